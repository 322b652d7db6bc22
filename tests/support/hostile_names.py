"""A profile whose names try to break out of a page."""

from dataclasses import replace

from recollect.profile.profile import Profile

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2028${1}{{data}}"


def evil_profile(profile: Profile) -> Profile:
    """The same step, with names that try to break out of the page."""
    graphs = tuple(
        replace(g, values=tuple(replace(v, name=f"{EVIL}.{v.name}") for v in g.values)) for g in profile.graphs
    )
    calls = tuple(replace(call, path=f"{EVIL}.{call.path}") for call in profile.calls)
    return replace(profile, graphs=graphs, calls=calls, model_class=EVIL, batch=EVIL, device_name=EVIL)
