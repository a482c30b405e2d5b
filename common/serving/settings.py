"""What a server is told at start-up."""

from __future__ import annotations

from dataclasses import dataclass, field

from dspine.common.errors import DSpineError
from dspine.common.serving.scheduler import SchedulerSettings

LOOPBACK = "127.0.0.1"


def graphs_mode(asked: str, max_concurrency: int, batch: bool = True) -> str:
    """`--graphs` as `load` wants it. Several sequences that take turns have no graphs: DSpineError where they are asked for."""
    if asked == "on" and max_concurrency > 1 and not batch:
        raise DSpineError(
            f"--graphs on: sequences that take turns (--no-batch) have no graphs, and --max-concurrency is {max_concurrency}; "
            "drop --no-batch, or use --max-concurrency 1"
        )
    return "off" if asked == "auto" and max_concurrency > 1 and not batch else asked


@dataclass(frozen=True)
class ServerSettings:
    """names: model ids that requests may use, the first is shown; api_key: None lets everyone in; max_context: prompt and
    answer together, None is the model's own; default_max_tokens: where a request names no limit; times in seconds."""

    names: tuple[str, ...]
    host: str = LOOPBACK
    port: int = 8000
    api_key: str | None = None
    max_context: int | None = None
    default_max_tokens: int = 512
    max_body_bytes: int = 4 * 2**20
    acceptance: str = "auto"
    policy: str = "auto"
    calibration: str | None = None
    grace: float = 30.0
    send_timeout: float = 60.0
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)

    def __post_init__(self) -> None:
        rules = (
            ("--max-concurrency", self.scheduler.max_concurrency, 1, 256),
            ("--max-queue", self.scheduler.max_queue, 0, 100_000),
            ("--prefill-chunk", self.scheduler.prefill_chunk, 1, 2**20),
            ("--prefix-grain", self.scheduler.prefix_grain, 1, 2**20),
            ("--default-max-tokens", self.default_max_tokens, 1, 2**31),
            ("--max-body", self.max_body_bytes, 1024, 2**31),
            ("--port", self.port, 0, 65535),
            ("--max-context", self.max_context or 2, 2, 2**31),
            ("--prefix-cache", self.scheduler.prefix_bytes, 0, 2**50),
        )
        for name, value, least, most in rules:
            if not least <= value <= most:
                raise DSpineError(f"{name} must be {least}..{most}, got {value}")
        if self.api_key is not None and (not self.api_key.strip() or not self.api_key.isascii()):
            raise DSpineError("--api-key must be ASCII and not empty")
        if self.grace < 0 or self.send_timeout <= 0:
            raise DSpineError("--grace must be 0 or more seconds, the send time-out above 0")
