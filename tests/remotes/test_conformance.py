"""What every remote does, asked of each kind that is really there."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from kvdb.remotes.registry import open_remote
from kvdb.remotes.remote import Get, Got, Put, Remote, RemoteConfig

SPACE = "ab" * 32


def key(number: int, part: str = "") -> str:
    return f"v1/{SPACE}/{number:06x}-{number:064x}{part}"


def get(remote: Remote, keys: Sequence[str], room: int = 1 << 16) -> list[bytes | Got]:
    buffers = [bytearray(room) for _ in keys]
    answers: dict[int, bytes | Got] = {}
    gets = [Get(name, memoryview(buffer)) for name, buffer in zip(keys, buffers, strict=True)]
    for got in remote.get_many(gets):
        assert got.index not in answers
        whole = got.nbytes is not None
        answers[got.index] = bytes(buffers[got.index][: got.nbytes]) if whole else got
    assert sorted(answers) == list(range(len(keys)))
    return [answers[index] for index in range(len(keys))]


def put(remote: Remote, number: int, data: bytes, *, replace: bool = False) -> str:
    return remote.put_many([Put(key(number), [memoryview(data)], replace)])[0]


def test_what_was_put_is_there_and_nothing_else(remote: Remote) -> None:
    many = {key(n): os.urandom(1 + 997 * n) for n in range(40)}
    many[key(3, ".logits")] = b"logits"
    puts = [
        Put(name, [memoryview(data)[:10], memoryview(b""), memoryview(data)[10:]])
        for name, data in many.items()
    ]
    assert remote.put_many(puts) == ["stored"] * len(puts)
    asked = [key(2), key(99), key(3, ".logits"), key(2, ".state_0"), key(39)]
    assert remote.exists_many(asked) == [True, False, True, False, True]
    absent = Got(1, None)
    assert get(remote, [*many, key(99)])[:-1] == list(many.values())
    assert get(remote, [key(1), key(99)])[1] == absent
    assert remote.exists_many([]) == []
    assert list(remote.get_many([])) == []
    assert remote.put_many([]) == []


def test_objects_are_listed_by_prefix_with_their_sizes(remote: Remote) -> None:
    for number in range(5):
        put(remote, number, b"x" * (number + 1))
    other = f"v1/{'cd' * 32}/namespace.json"
    remote.put_many([Put(other, [memoryview(b"{}")])])
    listed = sorted(remote.list(f"v1/{SPACE}/"))
    assert listed == [(key(number), number + 1) for number in range(5)]
    assert (other, 2) in set(remote.list("v1/"))
    assert list(remote.list("v1/" + "ef" * 32)) == []


def test_an_object_stays_what_it_was_unless_it_is_replaced(remote: Remote) -> None:
    assert put(remote, 1, b"first") == "stored"
    assert put(remote, 1, b"second") == "present"
    assert get(remote, [key(1)]) == [b"first"]
    assert put(remote, 1, b"third", replace=True) == "stored"
    assert get(remote, [key(1)]) == [b"third"]


def test_an_object_larger_than_its_buffer_is_not_fetched(remote: Remote) -> None:
    put(remote, 1, b"x" * 5000)
    put(remote, 2, b"y" * 100)
    large, small = get(remote, [key(1), key(2)], room=1000)
    assert isinstance(large, Got)
    assert large.nbytes is None
    assert large.problem == "too large"
    assert small == b"y" * 100


def test_large_objects_arrive_whole(remote: Remote) -> None:
    data = os.urandom(20 << 20)
    assert put(remote, 1, data) == "stored"
    assert get(remote, [key(1), key(1)], room=21 << 20) == [data, data]


def test_empty_objects_and_empty_buffers(remote: Remote) -> None:
    states = remote.put_many([Put(key(1), []), Put(key(2), [memoryview(b"")])])
    there = states == ["stored"] * 2
    assert there or states == ["failed"] * 2
    wanted = [b"", b""] if there else [Got(0, None), Got(1, None)]
    assert get(remote, [key(1), key(2)], room=0) == wanted
    assert remote.exists_many([key(1), key(1), key(2)]) == [there] * 3


def test_more_objects_than_a_page_holds(remote: Remote) -> None:
    """Servers list 1,000 keys at a time."""
    numbers = range(0, 2_100, 2)
    puts = [Put(key(number), [memoryview(b"%d" % number)]) for number in numbers]
    assert remote.put_many(puts) == ["stored"] * len(puts)
    assert remote.put_many([*puts[:3], Put(key(1), [memoryview(b"1")])]) == [
        *["present"] * 3,
        "stored",
    ]
    asked = [key(number) for number in range(2_000)]
    assert remote.exists_many(asked) == [n % 2 == 0 or n == 1 for n in range(2_000)]
    spread = [key(number) for number in range(0, 2_000, 7)]
    assert remote.exists_many(spread) == [n % 2 == 0 for n in range(0, 2_000, 7)]
    listed = [each.key for each in remote.list(f"v1/{SPACE}/")]
    assert sorted(listed) == sorted([key(1), *(put.key for put in puts)])


def test_of_two_who_put_at_once_one_wins_and_is_whole(config: RemoteConfig) -> None:
    programs = [open_remote(config) for _ in range(2)]
    try:
        contents = [b"a" * 300_000, b"b" * 200_000]
        for number in range(5):
            start, states = threading.Barrier(2), ["", ""]

            def work(which: int, number: int, start: threading.Barrier, states: list[str]) -> None:
                start.wait()
                states[which] = put(programs[which], number, contents[which])

            threads = [
                threading.Thread(target=work, args=(n, number, start, states)) for n in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found = get(programs[0], [key(number)], room=300_000)
            assert found == get(programs[1], [key(number)], room=300_000)
            assert found[0] in contents
            assert "stored" in states
            assert set(states) <= {"stored", "present"}
            if states.count("stored") == 1:
                assert found == [contents[states.index("stored")]]
    finally:
        for program in programs:
            program.close()


def test_two_programs_and_many_threads_see_one_another(config: RemoteConfig) -> None:
    one, other = open_remote(config), open_remote(config)
    try:
        wrong: list[int] = []

        def work(number: int) -> None:
            data = bytes([number]) * 10_000
            put(one if number % 2 else other, number, data)
            seen = get(other if number % 2 else one, [key(number)])
            if seen != [data]:
                wrong.append(number)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
    finally:
        one.close()
        other.close()
    one.close()  # twice is free
