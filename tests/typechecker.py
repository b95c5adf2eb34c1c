"""beartype as the tests use it: an int is a fine float, as in the rest of Python."""

from beartype import BeartypeConf, beartype

typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))
