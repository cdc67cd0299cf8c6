"""The one exception tree of both packages.

MedusaError                     every error that a user can meet
├── UsageError                  the request itself is wrong (exit code 2)
│   ├── ConfigError             a configuration key or value
│   ├── DataError               a dataset, a column, a template, a batch without responses
│   └── ModelError              a model folder that is missing or can't be used
└── RunError                    the request was right, doing it failed (exit code 1)
    ├── CheckpointError         a heads directory that is damaged or does not fit the actor
    ├── CompanionError          the companion process
    │   └── SavedStateError     the state that it should go on from
    ├── EngineError             the vLLM engine
    │   ├── SwapError           heads or actor weights that did not reach the engine
    │   │   └── NoRoomError     because there is no room for their file
    │   └── UnsupportedVersionError   a version of vLLM that was never checked
    ├── FeedError               a feed of heads: unreachable, damaged, another actor's
    │   └── BadVersionError     a version of it that is not what its manifest says
    ├── HubError                pushing heads to the model hub, or pulling them
    └── LossyError              a setting that would change the output distribution

Each message says what was given, what was expected, and what to do.
"""

from __future__ import annotations


class MedusaError(Exception):
    """Base of all errors meant for users.

    Args:
        problem: one sentence that says what is wrong.
        given: what the caller passed or what was found.
        expected: what would have been accepted.
        do: the next step for the reader.
    """

    exit_code = 1

    def __init__(
        self, problem: str, *, given: object = None, expected: object = None, do: str = ""
    ) -> None:
        self.problem = problem
        self.given = given
        self.expected = expected
        self.do = do
        lines = (("given:    ", given), ("expected: ", expected), ("do this:  ", do or None))
        self._text = "\n".join(
            [problem, *(f"  {label}{value}" for label, value in lines if value is not None)]
        )
        super().__init__(self._text)

    def __reduce__(self):
        # Ray pickles errors to send them between processes; by default, pickle can't restore
        # keyword-only arguments.
        return _rebuild, (type(self), self.problem, self.given, self.expected, self.do)

    def __str__(self) -> str:
        return self._text


def _rebuild(
    kind: type[MedusaError], problem: str, given: object, expected: object, do: str
) -> MedusaError:
    return kind(problem, given=given, expected=expected, do=do)


class UsageError(MedusaError):
    """The request itself is wrong."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration key or value is wrong."""


class DataError(UsageError):
    """A dataset, a column, a template, or a batch of responses is unusable."""


class ModelError(UsageError):
    """A model folder is missing or can't be used as an actor."""


class RunError(MedusaError):
    """The request was valid; carrying it out failed."""


class CheckpointError(RunError):
    """A heads directory is damaged or does not fit the actor."""


class CompanionError(RunError):
    """The companion process failed."""


class SavedStateError(CompanionError):
    """The saved state that a companion should go on from is damaged or does not fit its heads."""


class EngineError(RunError):
    """The vLLM engine failed or can't be reached."""


class SwapError(EngineError):
    """Heads or actor weights did not reach the engine."""


class NoRoomError(SwapError):
    """There is no room for the file of heads or actor weights. The engine is well and has what it
    had; starting it again makes no room.
    """


class UnsupportedVersionError(EngineError):
    """A version of another library that was never checked."""


class FeedError(RunError):
    """A feed of heads can't be reached, is damaged, or is another actor's."""


class BadVersionError(FeedError):
    """A version in a feed is not what its manifest says, or is not heads of its actor."""


class HubError(RunError):
    """Pushing heads to the model hub or pulling them failed."""


class LossyError(RunError):
    """A setting would change the distribution of the sampled tokens."""
