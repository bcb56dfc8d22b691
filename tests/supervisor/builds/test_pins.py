from supervisor.builds.discover import find_inside


def test_a_file_of_an_installed_package_is_found_without_importing_it() -> None:
    path = find_inside("pytest", "py.typed")
    assert path
    assert path.parent.name == "pytest"


def test_missing_files_and_modules_are_not_found() -> None:
    assert find_inside("pytest", "bin/llama-server") is None
    assert find_inside("no_such_module_anywhere", "x") is None
