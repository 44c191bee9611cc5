"""Every error that a user can meet.

    EyasError
    ├── UsageError          exit 2: wrong use or wrong input
    │   ├── RecipeError         a recipe that cannot be read or does not validate
    │   ├── StaleError          an artifact was made from other inputs than the recipe now names
    │   ├── ContractError       states, weights or rows that do not mean what the next stage needs
    │   └── RequestError        a server refuses a request as it is
    └── SurroundingsError   exit 3: disk, memory, a missing package, a folder in use

A message says what is wrong, where, what was found and what to do. Anything that is not an EyasError is a bug
(exit 70, with a traceback).
"""


class EyasError(Exception):
    exit_code = 70


class UsageError(EyasError):
    exit_code = 2


class RecipeError(UsageError):
    pass


class StaleError(UsageError):
    pass


class ContractError(UsageError):
    pass


class RequestError(UsageError):
    pass


class SurroundingsError(EyasError):
    exit_code = 3
