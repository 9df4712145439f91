"""The root of every error that Tasuki raises on purpose."""


class TasukiError(Exception):
    """Something a person can act on.

    The message is one line and names the actual value, the limit and the
    remedy. Anything else that escapes is a defect.
    """
