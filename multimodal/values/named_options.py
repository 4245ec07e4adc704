"""The text form of a choice by name with options: `name`, or `name:key=value,key`."""


def split_options(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the name, and each option as (key, value) in the given order; the value of an option without one is empty.

    A separator with nothing behind it gives an option whose key and value are empty.
    """
    name, separator, options = text.partition(":")
    parts = (part.partition("=") for part in (options.split(",") if separator else ()))
    return name, [(key.strip(), value.strip()) for key, _, value in parts]
