"""The state word: moved by compare-and-swap only, by the side whose turn it is."""

from __future__ import annotations

import itertools
import os
import threading
import time

import pytest

from kvserver._native import Direction, Outcome, State, WordMapping, WordPage

from .rig import L0, Device, Job, flat

IDLE, PENDING, RUNNING, DONE, FAILED, CANCELLED, CANCELLING = State
ONE = Job(blocks=[1], pages=[0], pages_per_slot=1, blocks_per_slot=1)


def bring_to(page: WordPage, index: int, sequence: int, state: State) -> None:
    page.arm(index, sequence)
    assert state == PENDING or page.move(index, sequence, PENDING, state)


@pytest.mark.parametrize("state", list(State))
def test_a_word_moves_only_from_the_state_it_is_in(state: State) -> None:
    page = WordPage(8)
    for from_, to in itertools.product(State, State):
        bring_to(page, 3, 7, state)
        assert page.move(3, 7, from_, to) == (from_ == state)
        assert page.state(3) == (to if from_ == state else state)


@pytest.mark.parametrize("state", list(State))
def test_a_word_does_not_move_for_another_operation(state: State) -> None:
    page = WordPage(1)
    bring_to(page, 0, 8, state)
    for sequence, to in itertools.product((7, 9, 0, 8 << 8), State):
        assert not page.move(0, sequence, state, to)
        assert page.state(0) == state


def test_words_do_not_touch_each_other() -> None:
    page = WordPage(3)
    page.arm(1, 5)
    assert [page.state(i) for i in range(3)] == [IDLE, PENDING, IDLE]


def test_a_word_is_armed_anew_whatever_became_of_the_last_operation() -> None:
    page = WordPage(1)
    for sequence, state in enumerate(State, start=1):
        bring_to(page, 0, sequence, state)
        page.arm(0, sequence + 1)
        assert page.state(0) == PENDING
        assert not page.move(0, sequence, PENDING, RUNNING)
        assert page.move(0, sequence + 1, PENDING, RUNNING)


@pytest.mark.parametrize("state", [DONE, FAILED, CANCELLED])
def test_a_move_that_ends_an_operation_ends_the_wait_for_it(state: State) -> None:
    page = WordPage(8)
    bring_to(page, 3, 7, RUNNING)
    ended: list[bool] = []
    waiting = threading.Thread(target=lambda: ended.append(page.wait(3, 60)))
    waiting.start()
    time.sleep(0.05)
    assert page.move(3, 7, RUNNING, state)
    waiting.join(30)
    assert ended == [True]


def test_the_end_of_a_copy_ends_the_wait_for_it() -> None:
    device = Device(delay_micros=50_000)
    l0 = L0(device, flat(4, 64))
    ticket = device.submit_with_word(Direction.LOAD, l0, ONE, index=9, sequence=3)
    assert l0.words.wait(9, 60)
    assert l0.words.state(9) == DONE
    assert device.wait(ticket).outcome == Outcome.DONE


def test_a_wait_ends_with_its_time_and_a_word_that_is_over_is_not_waited_for() -> None:
    page = WordPage(1)
    page.arm(0, 1)
    began = time.monotonic()
    assert not page.wait(0, 0.05)
    assert not page.wait(0, -1.0)
    assert time.monotonic() - began >= 0.05
    assert page.move(0, 1, PENDING, RUNNING)
    assert not page.wait(0, 0.001)
    for state in (IDLE, DONE, FAILED, CANCELLED, CANCELLING):
        bring_to(page, 0, 2, state)
        assert page.wait(0, 60)
    with pytest.raises(IndexError):
        page.wait(1, 60)


@pytest.mark.parametrize("index", [8, 9, 1 << 32, 1 << 61, (1 << 64) - 1])
def test_words_outside_the_page_are_refused(index: int) -> None:
    page = WordPage(8)
    device = Device()
    l0 = L0(device, flat(4, 64))
    for touch in (
        lambda: page.arm(index, 1),
        lambda: page.state(index),
        lambda: page.move(index, 1, PENDING, RUNNING),
    ):
        with pytest.raises(IndexError):
            touch()
    mapping = WordMapping(os.dup(page.fd), 8 * 8)
    assert device.map([mapping]).outcome == Outcome.DONE
    with pytest.raises(IndexError):
        mapping.fail_word(index, 1)
    with pytest.raises(ValueError, match="state word"):
        device.submit(Direction.STORE, l0, ONE, word_memory=mapping, word_index=index, sequence=1)


def test_a_word_page_that_is_not_mapped_is_refused() -> None:
    device = Device()
    l0 = L0(device, flat(4, 64))
    mapping = WordMapping(os.dup(l0.words.fd), 64 * 8)
    with pytest.raises(IndexError):
        mapping.fail_word(0, 1)
    with pytest.raises(ValueError, match="state word"):
        device.submit(Direction.STORE, l0, ONE, word_memory=mapping, word_index=0, sequence=1)


@pytest.mark.parametrize("words", [0, 1 << 61, (1 << 61) + 1, (1 << 64) - 1])
def test_a_page_of_an_impossible_size_is_refused(words: int) -> None:
    with pytest.raises(RuntimeError):
        WordPage(words)


def test_the_server_may_refuse_only_what_is_pending() -> None:
    page = WordPage(1)
    mapping = WordMapping(os.dup(page.fd), 8)
    assert Device().map([mapping]).outcome == Outcome.DONE
    for state in State:
        bring_to(page, 0, 5, state)
        assert not mapping.fail_word(0, 4)
        assert mapping.fail_word(0, 5) == (state == PENDING)
        assert page.state(0) == (FAILED if state == PENDING else state)


@pytest.mark.parametrize("direction", [Direction.STORE, Direction.LOAD])
def test_a_copy_that_ends_well_leaves_the_word_done(direction: Direction) -> None:
    device = Device()
    l0 = L0(device, flat(4, 64))
    ticket = device.submit_with_word(direction, l0, ONE, index=9, sequence=3)
    assert device.wait(ticket).outcome == Outcome.DONE
    assert l0.words.state(9) == DONE
    assert not l0.words.move(9, 3, RUNNING, CANCELLED), "too late: it counts"


@pytest.mark.parametrize("direction", [Direction.STORE, Direction.LOAD])
@pytest.mark.parametrize("state", [s for s in State if s != State.PENDING])
def test_a_copy_begins_only_if_its_word_is_pending(direction: Direction, state: State) -> None:
    device = Device()
    l0 = L0(device, flat(4, 64))
    l1, image = device.fill_l1(), l0.memory.image()
    bring_to(l0.words, 0, 3, state)
    ticket = device.submit(direction, l0, ONE, word_memory=l0.mappings[-1], word_index=0, sequence=3)
    end = device.wait(ticket)
    assert (end.outcome, end.bytes) == (Outcome.CANCELLED, 0)
    assert l0.words.state(0) == state
    assert device.read_l1() == l1
    assert l0.memory.image() == image


@pytest.mark.parametrize("direction", [Direction.STORE, Direction.LOAD])
def test_a_late_copy_does_not_touch_a_word_that_was_reused(direction: Direction) -> None:
    device = Device()
    l0 = L0(device, flat(4, 64))
    l1, image = device.fill_l1(), l0.memory.image()
    l0.words.arm(0, 3)
    l0.words.arm(0, 4)
    ticket = device.submit(direction, l0, ONE, word_memory=l0.mappings[-1], word_index=0, sequence=3)
    assert device.wait(ticket).outcome == Outcome.CANCELLED
    assert l0.words.state(0) == PENDING
    assert l0.words.move(0, 4, PENDING, CANCELLED)
    assert device.read_l1() == l1
    assert l0.memory.image() == image
