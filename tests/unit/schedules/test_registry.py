"""Schedules by name: aliases, errors that say what is legal, schedules of users and packages."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from pipeloom.errors import ScheduleError
from pipeloom.ir.notation import parse_grid
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules import registry
from pipeloom.schedules.entry import Constraint, describe_schedule
from pipeloom.schedules.registry import (
    USER_SCHEDULES,
    UserSchedules,
    build_schedule,
    find_schedule,
    list_schedules,
    register_schedule,
)

LIBRARY = [
    *("forward_only", "gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "looped_bfs"),
    *("interleaved_zero_bubble", "zb_h1", "zb_h2", "zb_auto", "zbv", "v_half", "v_min"),
    *("grouped_interleaved", "1f1b_v", "hanayo", "chimera", "dualpipe", "dualpipev"),
]


@pytest.fixture(autouse=True)
def _forget_registered() -> Iterator[None]:
    before = {entry.name for entry in list_schedules()}
    yield
    for entry in list_schedules():
        if entry.name not in before:
            USER_SCHEDULES.remove(entry.name)


def two_ranks(*, ranks: int, microbatches: int, twist: bool = False) -> Schedule:
    """Two ranks, one microbatch.

    More words.
    """
    assert not twist
    return parse_grid("0F0 0B0\n1F0 1B0")


def test_the_library_is_complete_and_described() -> None:
    entries = list_schedules()
    assert [entry.name for entry in entries] == LIBRARY
    for entry in entries:
        assert entry.summary.endswith((".", ":")) or ":" in entry.summary, entry.name
        assert entry.bubble, entry.name
        assert entry.peak, entry.name
        assert "::" in (entry.build.__doc__ or ""), f"{entry.name} has no drawing"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("GPipe", "gpipe"),
        ("1F1B", "1f1b"),
        ("Schedule1F1B", "1f1b"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("ScheduleInterleaved1F1B", "interleaved_1f1b"),
        ("interleaved-1f1b", "interleaved_1f1b"),
        ("LoopedBFS", "looped_bfs"),
        ("InterleavedZeroBubble", "interleaved_zero_bubble"),
        ("ZB1P", "interleaved_zero_bubble"),
        ("ZBVZeroBubble", "zbv"),
        ("scheduleZBVZeroBubble", "zbv"),
        ("DualPipeV", "dualpipev"),
        ("_ScheduleForwardOnly", "forward_only"),
        ("GIS", "grouped_interleaved"),
    ],
)
def test_spellings(spelling: str, name: str) -> None:
    assert find_schedule(spelling).name == name


def test_unknown_name_says_what_may_be_meant() -> None:
    with pytest.raises(ScheduleError, match=r"no schedule '1f2b'; did you mean .*1f1b"):
        build_schedule("1f2b", ranks=2, microbatches=2)
    with pytest.raises(ScheduleError, match="pipeloom schedules"):
        find_schedule("qqqqqq")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("interleaved_1f1b", (4, 9, None), r"microbatches divisible by .*: 8 or 10, not 9"),
        ("interleaved_zero_bubble", (4, 11, 2), r"microbatches divisible by .*: 10 or 12, not 11"),
        ("zb_h2", (4, 6, None), r"at least 2·ranks − 1 microbatches: 7, not 6"),
        ("dualpipev", (4, 7, 2), r"at least 2·ranks microbatches: 8, not 7"),
        ("dualpipe", (3, 6, None), r"an even number of ranks: 2 or 4, not 3"),
        ("chimera", (4, 5, None), r"an even number of microbatches: 4 or 6, not 5"),
        ("hanayo", (4, 4, 3), r"an even number of chunks: 2 or 4, not 3"),
        ("zbv", (4, 8, 3), r"zbv has exactly 2 chunks per rank, not 3"),
        ("1f1b", (4, 8, 2), r"1f1b has exactly 1 chunk per rank, not 2"),
        ("gpipe", (0, 8, None), r"ranks to be a whole number, 1 or more, not 0"),
        ("gpipe", (4, 2.5, None), r"microbatches to be a whole number, 1 or more, not 2.5"),
        ("gpipe", (True, 2, None), r"ranks to be a whole number"),
    ],
)
def test_constraints_say_what_is_legal(
    name: str, shape: tuple[int, int, int | None], message: str
) -> None:
    ranks, microbatches, chunks = shape
    with pytest.raises(ScheduleError, match=message):
        build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ScheduleError) as caught:
        build_schedule("dualpipe", ranks=3, microbatches=5, chunks=4, overlap=2)
    text = str(caught.value)
    assert text.count("dualpipe") == 5
    for word in ("option 'overlap'", "even number of ranks", "even number of microb", "at least"):
        assert word in text


def test_suggested_values_are_legal() -> None:
    for entry in list_schedules():
        for ranks in (2, 4, 6):
            for near in range(1, 30):
                for legal in entry.legal_microbatches(ranks, near=near):
                    schedule = entry.build(ranks=ranks, microbatches=legal)
                    assert schedule.num_microbatches == legal
    assert find_schedule("interleaved_1f1b").legal_microbatches(4, 2, near=9) == (8, 10)
    assert find_schedule("gpipe").legal_microbatches(4, near=9) == (9,)


def test_options() -> None:
    with pytest.raises(ScheduleError, match="did you mean 'group_size'"):
        build_schedule("interleaved_1f1b", ranks=2, microbatches=4, groupsize=2)
    with pytest.raises(ScheduleError, match="gpipe has no option 'x'; it has none"):
        build_schedule("gpipe", ranks=2, microbatches=4, x=2)
    with pytest.raises(ScheduleError, match="a group_size of at least the number of ranks"):
        build_schedule("interleaved_1f1b", ranks=4, microbatches=8, group_size=3)
    options = {str(option) for option in find_schedule("hanayo").options}
    assert options == {"waves: int | None = None"}
    assert find_schedule("interleaved_1f1b").default_chunks == 2
    assert find_schedule("zbv").default_chunks == 2
    assert find_schedule("dualpipe").default_chunks == 1


@pytest.mark.parametrize("waves", [0, -1, 1.5, "two", 3])
def test_waves_that_cannot_be(waves: object) -> None:
    with pytest.raises(ScheduleError, match="hanayo needs 1 or more waves"):
        build_schedule("hanayo", ranks=2, microbatches=2, chunks=4, waves=waves)


def test_functions_check_their_shape_too() -> None:
    from pipeloom.schedules.interleaved import interleaved_1f1b

    with pytest.raises(ScheduleError, match="8 or 10"):
        interleaved_1f1b(ranks=4, microbatches=9)
    assert interleaved_1f1b.entry.name == "interleaved_1f1b"


def test_register_a_function_as_it_is() -> None:
    @register_schedule
    def mine(*, ranks: int, microbatches: int) -> Schedule:
        """My own."""
        return parse_grid("0F0 0B0\n1F0 1B0")

    assert find_schedule("Mine").summary == "My own."
    assert build_schedule("mine", ranks=2, microbatches=1).name == "mine"
    assert mine.entry in list_schedules()


def test_register_with_a_description() -> None:
    register_schedule(
        "pair",
        aliases=("duo",),
        constraints=(Constraint("2 ranks", lambda shape: shape.ranks == 2, "ranks"),),
    )(two_ranks)
    entry = find_schedule("duo")
    assert (entry.name, entry.summary) == ("pair", "Two ranks, one microbatch.")
    assert [str(option) for option in entry.options] == ["twist: bool = False"]
    with pytest.raises(ScheduleError, match="pair needs 2 ranks: 2, not 3"):
        build_schedule("duo", ranks=3, microbatches=1)
    # A notebook cell that is run again replaces what it registered.
    register_schedule("pair")(two_ranks)
    assert find_schedule("pair").aliases == ()


def test_names_of_the_library_cannot_be_taken() -> None:
    with pytest.raises(ScheduleError, match="'1F1B' belongs to 1f1b of the library"):
        register_schedule("1F1B")(two_ranks)
    with pytest.raises(ScheduleError, match="belongs to zbv"):
        register_schedule("other", aliases=("ZBVZeroBubble",))(two_ranks)
    with pytest.raises(ScheduleError, match="no schedule 'nobody' was registered"):
        USER_SCHEDULES.remove("nobody")


def test_arguments_need_not_be_keyword_only_to_be_options() -> None:
    @register_schedule("deep")
    def deep(ranks: int, microbatches: int, depth: int = 3) -> Schedule:
        assert depth == 4
        return parse_grid("0F0 0B0\n1F0 1B0")

    assert [str(option) for option in deep.entry.options] == ["depth: int = 3"]
    assert build_schedule("deep", ranks=2, microbatches=1, depth=4).name == "deep"


def test_what_a_function_makes_is_what_was_asked_for() -> None:
    register_schedule("pair")(two_ranks)
    with pytest.raises(
        ScheduleError, match="asked for 4 ranks and 8 microbatches and made 2 and 1;"
    ):
        build_schedule("pair", ranks=4, microbatches=8)

    @register_schedule
    def forgetful(*, ranks: int, microbatches: int) -> Schedule:
        return None  # type: ignore[return-value]

    with pytest.raises(ScheduleError, match="forgetful returned None, not a Schedule"):
        build_schedule("forgetful", ranks=2, microbatches=1)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"),
    [("gpipe", 2, 10**9), ("zb_h2", 10**9, 2), ("interleaved_1f1b", 7, 10**12)],
)
def test_numbers_that_no_machine_could_hold_are_refused_at_once(
    name: str, ranks: int, microbatches: int
) -> None:
    with pytest.raises(ScheduleError, match="forwards, which is more than 10000000"):
        build_schedule(name, ranks=ranks, microbatches=microbatches)


def test_functions_that_take_no_shape_are_refused() -> None:
    with pytest.raises(ScheduleError, match="it lacks microbatches"):

        @register_schedule("half")  # type: ignore[arg-type]
        def half(*, ranks: int) -> Schedule:
            raise AssertionError


described = describe_schedule(name="described")(two_ranks)


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    def declare(name: str, attribute: str) -> EntryPoint:
        return EntryPoint(name, f"{__name__}:{attribute}", registry.ENTRY_POINT_GROUP)

    declared = [
        declare("plain", "two_ranks"),
        declare("any", "described"),
        declare("broken", "nothing_of_this_name"),
        declare("GPipe", "two_ranks"),
    ]

    monkeypatch.setattr(registry, "entry_points", lambda group: declared)
    monkeypatch.setattr(
        EntryPoint, "load", lambda self: globals()[self.value.partition(":")[2]], raising=True
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = [entry.name for entry in UserSchedules().entries()]
    assert names == ["plain", "described"]
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2
    assert "'broken'" in texts[0]
    assert "KeyError" in texts[0]
    assert "belongs to the library" in texts[1]
