"""The root of every error that Tasuki raises on purpose."""

# Begins the line on stderr by which a process says why it gives up.
ERROR_PREFIX = "tasuki: error: "


class TasukiError(Exception):
    """Something a person can act on.

    The message is one line and names the actual value, the limit and the
    remedy. Anything else that escapes is a defect.

    Attributes:
        exit_code: Of a process that ends by it.
    """

    exit_code = 1
