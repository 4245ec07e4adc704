"""Items that producers decode are those that a rank decodes, whatever happens to producers."""

import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save

from megatron.runtime.feed.producers import connection, produced_items, producer, wire
from megatron.runtime.feed.producers.produced_items import ProducedItems, describe_data_set
from multimodal.data.forms.sample_files import open_sample_files
from multimodal.data.index.item_reader import ItemReader, WantedItem
from multimodal.data.index.sample_index import IndexedItem
from multimodal.data.index.sample_indexer import IndexOptions
from multimodal.data.sample_source import ItemPixels
from multimodal.values.errors import ConfigError, DataError
from tests.unit.runtime.feed.producers.conftest import GRAPH, TEXTS, TOKEN, Serving

OPTIONS = IndexOptions(64)
PATCHES = save({"patches": np.zeros((1, 1), np.uint8)})


@pytest.fixture(autouse=True)
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[WantedItem]:
    found: list[WantedItem] = []
    decode = producer.decode_item

    def counted(data_set: str, item: WantedItem) -> ItemPixels:
        found.append(item)
        return decode(data_set, item)

    monkeypatch.setattr(producer, "decode_item", counted)
    return found


@pytest.fixture
def wanted(tmp_path: Path) -> list[WantedItem]:
    drawn, found = np.random.default_rng(0), []
    for number in range(12):
        size = 16 + 8 * (number % 4), 24
        Image.fromarray(drawn.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
        item = IndexedItem("vision", str(tmp_path / f"{number}.png"), size, (size[1] // 4, size[0] // 4))
        found.append(WantedItem(item, f"line {number}"))
    return found


def _local() -> ItemReader:
    return ItemReader(GRAPH, open_sample_files(__file__))  # of files, whatever data name them


_OPENED: list[ProducedItems] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close what a test opened; a socket that the garbage collector ends may keep the next one from seeing its handshake."""
    yield
    while _OPENED:
        _OPENED.pop().close()


def _open(tmp_path: Path, *producers: Serving) -> ProducedItems:
    (tmp_path / "manifest.jsonl").touch()
    data_set = describe_data_set(GRAPH, tmp_path / "manifest.jsonl", texts=TEXTS, options=OPTIONS)
    _OPENED.append(ProducedItems([each.address for each in producers], token=TOKEN, data_set=data_set, local=_local()))
    return _OPENED[-1]


def _check(found: ProducedItems, wanted: list[WantedItem]) -> None:
    for each in wanted:
        expected, pixels = _local().read(each), found.read(each)
        assert pixels.grid == expected.grid and pixels.patches.dtype == expected.patches.dtype
        np.testing.assert_array_equal(pixels.patches, expected.patches)


def test_items_come_in_any_order_and_each_is_decoded_once(serve, wanted, decoded, tmp_path):
    first, second = serve(), serve()
    ranks = [_open(tmp_path, first, second) for _ in range(2)]
    ranks[0].check()
    for rank in ranks:
        rank.expect(wanted)
    for rank in ranks:
        _check(rank, wanted[::-1])
    assert len(decoded) == len(wanted) and set(decoded) == set(wanted)


def test_what_was_expected_before_may_be_left(serve, wanted, tmp_path):
    found = _open(tmp_path, serve())
    found.expect(wanted[:6])
    found.read(wanted[3])
    found.expect(wanted[6:])
    _check(found, [*wanted[6:], wanted[0]])


def test_a_small_cache_lets_items_go(serve, wanted, decoded, tmp_path):
    found = _open(tmp_path, serve(cache_bytes=0))
    for _ in range(2):
        found.expect(wanted)
        _check(found, wanted)
    assert len(decoded) == 2 * len(wanted)


def test_a_lost_producer_s_items_come_from_the_other(serve, wanted, decoded, tmp_path, monkeypatch):
    """It closes its connection in the middle of a step."""
    failing, other = serve(), serve()
    asked = failing.close_after(3)
    found = _open(tmp_path, failing, other)
    for _ in range(2):
        found.expect(wanted)
        _check(found, wanted)
    assert asked[0] > 3
    assert set(decoded) == set(wanted)


def test_without_producers_a_rank_decodes_until_one_is_back(serve, wanted, decoded, tmp_path, monkeypatch):
    monkeypatch.setattr(produced_items, "ABSENCE_SECONDS", 0.0)
    lost, back = serve(), serve()
    found = _open(tmp_path, lost)
    lost.stop()
    found.expect(wanted)
    _check(found, wanted)
    assert not decoded
    found._addresses[lost.address] = wire.parse_address(back.address)
    found.expect(wanted)
    _check(found, wanted)
    assert set(decoded) == set(wanted)


def test_a_silent_producer_is_done_without(wanted, tmp_path, monkeypatch):
    """It decodes for ever."""
    hanging, asked = Serving(), SimpleQueue[WantedItem]()

    def hang(data_set: str, item: WantedItem) -> Future[ItemPixels]:
        asked.put(item)
        return Future()

    monkeypatch.setattr(hanging.producer, "_decode", hang)
    found = _open(tmp_path, hanging)
    found.expect(wanted)
    assert asked.get(timeout=60) in wanted
    monkeypatch.setattr(connection, "SILENCE_SECONDS", 0.0)
    _check(found, wanted)


@pytest.mark.parametrize(
    ("num_patches", "spoilt"), [(1, {}), (0, {}), (None, {"grid": (1, 1)}), (None, {"grid": (2**70, 2**70)})]
)
def test_items_of_other_shapes_are_decoded_here(num_patches, spoilt, serve, wanted, tmp_path, monkeypatch):
    """A producer whose items have fewer patches, or another grid, than the index says would shift all that follow in a batch."""
    good = wire.pack_pixels

    def spoil(pixels: ItemPixels) -> tuple[dict[str, Any], bytes]:
        said, values = good(ItemPixels(pixels.patches[:num_patches], pixels.grid))
        return said | spoilt, values

    monkeypatch.setattr(wire, "pack_pixels", spoil)
    found = _open(tmp_path, serve())
    found.expect(wanted)
    _check(found, wanted)


def test_a_damaged_file_is_told_as_if_it_had_been_decoded_here(serve, wanted, tmp_path):
    Path(wanted[1].item.path).write_bytes(b"no picture")
    found = _open(tmp_path, serve())
    found.expect(wanted)
    with pytest.raises(DataError) as here:
        _local().read(wanted[1])
    with pytest.raises(DataError) as there:
        found.read(wanted[1])
    assert str(there.value) == str(here.value)
    _check(found, [wanted[0], *wanted[2:]])


def test_a_request_that_cannot_be_met_is_answered(serve, wanted, tmp_path, caplog):
    found = _open(tmp_path, serve())
    found.expect([WantedItem(replace(wanted[0].item, unit="nobody"), "line 0"), *wanted])
    _check(found, wanted)
    assert {"a request failed: 'nobody'"} <= set(caplog.messages)


def test_both_sides_refuse_another_token(serve, wanted, tmp_path):
    found = _open(tmp_path, serve(token=b"another token, as long"))
    unproven = "it (has another token, or is no producer|did not prove .*); start it with"
    with pytest.raises(ConfigError, match=f"--producers 127.0.0.1:.*: {unproven}"):
        found.check()


def test_a_producer_that_does_not_find_the_data_set_says_so(serve, tmp_path):
    data_set = describe_data_set(GRAPH, tmp_path / "elsewhere.jsonl", texts=TEXTS, options=OPTIONS)
    with pytest.raises(ConfigError, match="elsewhere.jsonl"):
        ProducedItems([serve().address], token=TOKEN, data_set=data_set, local=_local()).check()


def test_nobody_there(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    (tmp_path / "manifest.jsonl").touch()
    data_set = describe_data_set(GRAPH, tmp_path / "manifest.jsonl", texts=TEXTS, options=OPTIONS)
    with pytest.raises(ConfigError, match=f"--producers {address}: .*refused.*; start it with"):
        ProducedItems([address], token=TOKEN, data_set=data_set, local=_local()).check()


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 200, b"\xff" * 200])
def test_noise_ends_a_connection_and_nothing_else(noise, serve, wanted, tmp_path):
    serving = serve()
    address = wire.parse_address(serving.address)
    with suppress(OSError), socket.create_connection(address, timeout=10) as peer:  # it may be refused before all of it is sent
        peer.sendall(noise)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(1024):
            pass
    found = _open(tmp_path, serving)
    found.expect(wanted)
    _check(found, wanted)


@pytest.mark.parametrize(
    ("said", "payload"),
    [
        ({"grid": [1, 1]}, b""),
        ({"grid": [1, 1]}, PATCHES[:-1]),
        ({"grid": [1, 1]}, save({"patches": np.zeros((1, 1), np.bool_)})),
        ({"grid": [1, 1]}, save(dict.fromkeys("ab", np.zeros((1, 1), np.uint8)))),
        ({"grid": [1]}, PATCHES),
        ({}, PATCHES),
        ([], PATCHES),
    ],
)
def test_items_that_are_none_are_refused(said, payload):
    with pytest.raises(wire.WireError, match="an item that is none"):
        wire.unpack_pixels(said, bytearray(payload))


@pytest.mark.parametrize(
    "said", [{}, [], ["a"], {"unit": "vision", "path": "a", "size": [1], "grid": [1, 1], "tile": 0, "where": ""}]
)
def test_requests_that_are_none_are_refused(said):
    with pytest.raises(wire.WireError, match="a request that is none"):
        wire.unpack_wanted(said)


@pytest.mark.parametrize("text", ["host", ":1", "host:", "host:x", "host:99999"])
def test_addresses_are_checked(text):
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        wire.parse_address(text)


def test_a_message_that_is_nested_too_deeply_is_no_json():
    with pytest.raises(wire.WireError, match="no JSON"):
        wire.unpack_message(b"[" * 10**6)


@pytest.mark.parametrize("says", [b"", b"\xff", b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE" + b"\0" * 60 + b"\2" + b"\xff" * 8])
def test_strangers_without_number_keep_no_rank_away(says, serve, wanted, tmp_path):
    """They say nothing, or a part of a greeting, or announce a frame of 2**64 bytes; all stay connected."""
    serving = serve()
    with ExitStack() as stack:
        for _ in range(300):
            peer = stack.enter_context(socket.create_connection(wire.parse_address(serving.address), timeout=20))
            with suppress(OSError):  # it had to make place for others
                peer.sendall(says)
        found = _open(tmp_path, serving)
        found.check()
        found.expect(wanted)
        _check(found, wanted)


def test_a_silent_stranger_in_a_producer_s_place_is_told_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "HANDSHAKE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = ProducedItems([f"127.0.0.1:{listener.getsockname()[1]}"], token=TOKEN, data_set="", local=_local())
        with pytest.raises(ConfigError, match="did not prove the token within|has another token"):
            found.check()
