"""Texts of chosen lengths, so that a ring of 128 rows wraps several times."""

_SCENES = (
    "On day {day} the keeper climbed {stairs} steps to the lamp and wrote the wind in his book. ",
    "A ship passed {miles} miles out, too far to name, and left a line of smoke behind it. ",
    "He had {tins} tins of coffee left, so he counted them twice and drank water instead. ",
    "The glass stood at {pressure} and was falling; gulls came in to sit along the wall. ",
    "In the evening he read aloud for {minutes} minutes, to hear what a voice was like. ",
    "Nothing else happened, which he also wrote down, because the rules of the house required it. ",
)

TOKENS_A_DAY = 120
"""About what one day of the story takes in DeepSeek-V4's tokens."""


def story(days: int) -> str:
    """A story of ``days`` paragraphs, each different, about ``TOKENS_A_DAY`` tokens long."""
    return "\n".join(_day(day) for day in range(1, days + 1))


def _day(day: int) -> str:
    return "".join(_SCENES).format(
        day=day,
        stairs=190 + day * 7 % 40,
        miles=3 + day * 5 % 11,
        tins=40 - day % 37,
        pressure=980 + day * 13 % 45,
        minutes=10 + day * 3 % 25,
    )
