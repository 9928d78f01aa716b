"""What is logged, where nobody has set up logging: `CommConfig.log_level`."""

import logging

FORMAT = "%(asctime)s %(levelname)s %(name)s [%(process)d]: %(message)s"


def show(level: str) -> None:
    """Log "rlinf" from this level on; to stderr, unless there is a handler for it already."""
    if not level:
        return
    logger = logging.getLogger("rlinf")
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
