import subprocess
from pathlib import Path

from supervisor.bench.html_report import shell


def test_a_shell_reads_the_same_words_again(tmp_path: Path) -> None:
    words = ["printf", r"%s\n", f"{tmp_path}/my model.gguf", f"{tmp_path}/", "it's", "", "a;b"]
    line = shell(words, tmp_path)
    assert line == r"printf '%s\n' ~/'my model.gguf' " + f"{tmp_path}/" + """ 'it'"'"'s' '' 'a;b'"""
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    printed = subprocess.run(
        ["/bin/sh", "-c", line], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout.split("\n") == [*words[2:], ""]
