"""The error of a checkpoint that cannot be made as asked."""


class BadOption(ValueError):
    """An option has a value that cannot work.

    Raised before anything is written. The message names the option as the user typed it, the
    value, what is wrong with it, and what to give instead.
    """

    def __init__(self, option: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(f"{option} {value}: {problem}; {remedy}")
        self.option = option
        self.value = value
