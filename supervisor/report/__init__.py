"""What a bug report needs, in one archive: no keys, and no prompts unless they are asked for."""
