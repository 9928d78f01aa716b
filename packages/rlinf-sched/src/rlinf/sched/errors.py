"""Everything that can go wrong in planning.

SchedError
├── GraphError             the workflow itself makes no sense
├── DocumentError          a YAML or JSON document: names the path and the reason
│   ├── ProfileError
│   ├── PlanError
│   └── ConfigError
├── InfeasibleError        no plan exists; carries the arithmetic of why
├── ExtrapolationError     a fit was asked too far from what was measured
└── TraceError             a recorded trace cannot be read
"""


class SchedError(Exception):
    """Base of every error raised by rlinf.sched."""

    def __init__(self, *values: object) -> None:
        super().__init__(*values)
        self.add_note(f"see docs/troubleshooting.md#{type(self).__name__.lower()}")


class GraphError(SchedError, ValueError):
    """A workflow with unknown, repeated or missing components."""


class DocumentError(SchedError, ValueError):
    """A document does not say what it must.

    Attributes:
        path: where in the document, for example ``components.rollout.times[2].devices``.
        reason: what is wrong there and what is expected.
        source: the file, or "" for a document which is not in a file.
    """

    def __init__(self, path: str, reason: str, source: str = "") -> None:
        self.path, self.reason, self.source = path, reason, source
        super().__init__(": ".join(part for part in (source, path, reason) if part))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.reason, self.source)


class ProfileError(DocumentError):
    """A profile or workflow document is wrong."""


class PlanError(DocumentError):
    """A plan document, or a plan built by hand, is wrong."""


class ConfigError(DocumentError):
    """A planner setting is unknown or out of range."""


class InfeasibleError(SchedError):
    """No plan fits the devices.

    Attributes:
        reasons: one line of arithmetic for every obstacle found.
    """

    def __init__(self, reasons: tuple[str, ...]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("no plan fits: " + "; ".join(self.reasons))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.reasons,)


class ExtrapolationError(SchedError, ValueError):
    """A fitted curve was asked beyond four times the range it was measured on."""


class TraceError(SchedError, ValueError):
    """A trace file is missing, unreadable or holds no worker spans."""
