"""What vLLM calls: decide on a platform, name our classes, nothing else."""


def platform() -> str | None:
    return None


def register() -> None:
    return None
