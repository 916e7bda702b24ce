"""A second stream beside the one that steps are enqueued on; on the CPU there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Moment:
    """A place in a stream. Where there are no streams, all of them are past."""

    event: torch.cuda.Event | None

    @classmethod
    def past(cls) -> Moment:
        return cls(None)

    def is_past(self) -> bool:
        return self.event is None or self.event.query()


class Streams:
    """The stream of steps and the one beside it."""

    def __init__(self, device: torch.device) -> None:
        self.is_card = device.type == "cuda"
        self._beside = torch.cuda.Stream(device) if self.is_card else None

    def wait(self, moment: Moment) -> None:
        """Have the stream of steps wait, not the host."""
        if moment.event is not None:
            torch.cuda.current_stream().wait_event(moment.event)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Enqueue on the second stream, behind all that was enqueued on the first so far."""
        if self._beside is None:
            yield
            return
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            yield

    def mark(self) -> Moment:
        """The end of what was enqueued so far, on the stream that is current."""
        if not self.is_card:
            return Moment.past()
        event = torch.cuda.Event()
        event.record()
        return Moment(event)

    def finish(self) -> None:
        if self._beside is not None:
            self._beside.synchronize()
