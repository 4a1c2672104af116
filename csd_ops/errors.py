"""The errors of the toolkit: what the user can mend, what the machine lacks; anything else is our own bug."""


class CsdError(Exception):
    """Base of the errors that are told in one sentence: what was expected, what was found, what to do."""


class InputError(CsdError):
    """The user's input is wrong: a file, a number, a name."""


class MachineError(CsdError):
    """The machine cannot do it: a missing package, provider, permission, memory or disk."""
