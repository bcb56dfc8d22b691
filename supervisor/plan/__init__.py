"""Plans an instance: its command line and memory, from profile, settings and machine.

`plan.make_plan` is the entry. It merges settings (`resolve`), derives each `auto` (`auto`,
`embedding`, `draft`), renders them for the installed build (`render`), and estimates memory
(`estimate`, `fit`, `shortage`). Only `profile`, `tuned_profile`, `draft` and `loras` read files;
everything else is pure.
"""
