"""`recollect.__all__` is what the package offers: sorted, complete, importable, and stable against submodules."""

import pkgutil

import recollect


def test_all_is_sorted() -> None:
    assert recollect.__all__ == sorted(recollect.__all__)


def test_all_matches_the_homes_of_the_names() -> None:
    assert set(recollect.__all__) == set(recollect._HOME_OF_NAME)


def test_names_can_be_imported_and_live_where_the_table_says() -> None:
    for name in recollect.__all__:
        thing = getattr(recollect, name)
        assert callable(thing), name
        assert thing.__module__ == recollect._HOME_OF_NAME[name]
        assert thing.__doc__, name
        assert name in dir(recollect)


def test_no_submodule_hides_a_public_name() -> None:
    submodules = {module.name for module in pkgutil.iter_modules(recollect.__path__)}
    assert submodules.isdisjoint(recollect.__all__)
