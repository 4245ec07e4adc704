"""Mutations of what a run connects to: producers that are none, strangers at a producer's port, and a launcher's nonsense."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec

from multimodal.data.chat.text_settings import TextSettings
from multimodal.data.index.sample_indexer import IndexOptions
from multimodal.values.model_graph import ModelGraph
from tests.distributed.mutations.elastic_store import NOISE, send
from tests.distributed.mutations.mutation import Inputs, Mutation, short
from tests.distributed.small_run import MODEL, NUM_RANKS

TOKEN = b"a secret of these tests"

ANSWERS = {
    "hangs up": b"",
    "speaks HTTP": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "sends zeros": b"\0" * 4096,
    "promises much": b"\xff" * 16,
    "sends a pickle": b"\x80\x04cos\nabort\n(tR.",
}
"""What a stranger sends to whoever connects, before it hangs up."""
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
TEXTS = ("", "-1", "text", "1.5", "9" * 12)


def connection_mutations() -> Iterator[Mutation]:
    """Name a producer that is none, or give all ranks or one of them another environment."""
    for name, answer in ANSWERS.items():
        apply = partial(_meet_stranger, answer=answer)
        yield Mutation(f"producer: {name}", apply, ("127.0.0.1",), must_be_refused=True)
    for name, address in {"nobody there": "127.0.0.1:1", "no port": "127.0.0.1", "no host": "no.such.host.invalid:80"}.items():
        apply = partial(_name_producer, address=address)
        yield Mutation(f"producer: {name}", apply, (address.split(":")[0],), must_be_refused=True)
    for token in ("no/such/file", "/dev/null", "."):
        apply = partial(_name_producer, address="127.0.0.1:1", token=token)
        yield Mutation(f"producer: token {token}", apply, (token,), must_be_refused=True)
    if find_spec("zmq") is not None:
        yield from _producer_mutations()
    for variable in VARIABLES:
        for text in TEXTS:
            apply = partial(_set_variable, name=variable, text=text)
            yield Mutation(f"environment: {variable} {short(text)}", apply, (variable,), must_be_refused=True)


def _producer_mutations() -> Iterator[Mutation]:
    for name, noise in NOISE.items():
        for num_peers in (1, 300):
            apply = partial(_meet_producer, talk=partial(_send_noise, noise=noise, num_peers=num_peers))
            yield Mutation(f"producer: port: {num_peers} connections that send {name}", apply, must_train=True)
    for name, request in REQUESTS.items():
        for opens in (False, True):
            apply = partial(_meet_producer, talk=partial(_ask, request=request, opens=opens))
            shown = "behind a data set" if opens else "as a data set"
            yield Mutation(f"producer: port: asked {name} {shown}", apply, must_train=True)
    for name, answer in MESSAGES.items():
        yield Mutation(f"producer: its first message is {name}", partial(_meet_impostor, first=answer, answer=answer))
        yield Mutation(f"producer: its messages are {name}", partial(_meet_impostor, answer=answer), must_train=True)


def _set_variable(inputs: Inputs, *, name: str, text: str) -> None:
    inputs.environment_of_rank = {rank: {name: text} for rank in range(NUM_RANKS)}


def _name_producer(inputs: Inputs, *, address: str, token: str | None = None) -> None:
    path = inputs.folder / "token"
    path.write_bytes(TOKEN)
    inputs.flags |= {"--producers": address, "--producer-token": token or path, "--num-workers": 1}


def _meet_stranger(inputs: Inputs, *, answer: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60.0)

    def serve() -> None:
        with listener, suppress(OSError):
            while True:
                met, _ = listener.accept()
                with met, suppress(OSError):
                    met.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    _name_producer(inputs, address=f"127.0.0.1:{listener.getsockname()[1]}")


Message = list[bytes]
MESSAGES: dict[str, Message] = {
    "no JSON": [b"{no JSON", b""],
    "nothing": [b"", b""],
    "not UTF-8": [b"\xff\xfe", b""],
    "JSON nested deep": [b"[" * 10**6, b""],
    "a list": [b"[]", b""],
    "a number of 5,000 digits": [b'{"ahead": ' + b"9" * 5000 + b"}", b""],
    "an object without keys": [b"{}", b""],
    "a null": [b"null", b""],
    "of one part": [b"{}"],
    "of five parts": [b"{}", b"", b"", b"", b""],
    "a pickle": [b"cos\nabort\n(tR.", b""],
    "a failure": [b'{"failure": ["no text"]}', b""],
    **{
        f"an item {name}": [json.dumps({"arrays": [["uint8", [1, 192]]], "grid": [1, 1]} | changes).encode(), bytes(192)]
        for name, changes in {
            "of one patch": {},
            "of objects": {"arrays": [["object", [1, 192]]]},
            "of no known type": {"arrays": [["uint7", [1, 192]]]},
            "of more numbers than came": {"arrays": [["uint8", [2**40, 192]]]},
            "of a negative shape": {"arrays": [["uint8", [-1, 192]]]},
            "of a shape that is a text": {"arrays": [["uint8", "192"]]},
            "of a huge grid": {"grid": [2**70, 2**70]},
            "without a grid": {"grid": []},
        }.items()
    },
}
"""What a producer with the token answers; nobody decodes what it spoils but the ranks themselves."""
REQUESTS = {
    "no JSON": b"{no JSON",
    "nothing": b"",
    "not UTF-8": b"\xff\xfe",
    "JSON nested deep": b"[" * 10**6,
    "a list": b"[]",
    "a text": b'"text"',
    "a list of lists": b"[[[]]]",
    "a sample that is none": b'[0, ["", {"kind": "text", "role": 1}]]',
    "a file that is a device": json.dumps(
        {"unit": "vision", "path": "/dev/zero", "size": [8, 8], "grid": [1, 1], "tile": 0, "where": ""}
    ).encode(),
    "an item of an unknown unit": json.dumps(
        {"unit": "nobody", "path": "a", "size": [8, 8], "grid": [1, 1], "tile": 0, "where": ""}
    ).encode(),
    "an item of a huge size": json.dumps(
        {"unit": "vision", "path": "0.png", "size": [2**40, 2**40], "grid": [2**40, 2**40], "tile": -1, "where": ""}
    ).encode(),
}
"""What somebody with the token asks of a producer."""


def _meet_producer(inputs: Inputs, *, talk: Callable[[Inputs, tuple[str, int]], object]) -> None:
    """Start a producer, let others talk to it, and have the run use it."""
    from megatron.runtime.feed.producers.producer import Producer

    serving = Producer(token=TOKEN, num_workers=1, cache_bytes=2**20)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()[:2]
    thread = threading.Thread(target=serving.serve, args=(listener,), daemon=True)
    thread.start()
    inputs.stack.callback(thread.join, 20)
    inputs.stack.callback(serving.close)
    talk(inputs, address)
    _name_producer(inputs, address=f"127.0.0.1:{address[1]}")


def _send_noise(inputs: Inputs, address: tuple[str, int], *, noise: bytes, num_peers: int) -> None:
    for peer in send(address[1], noise=noise, num_peers=num_peers):
        inputs.stack.enter_context(peer)


def _ask(inputs: Inputs, address: tuple[str, int], *, request: bytes, opens: bool) -> None:
    import zmq

    from megatron.runtime.feed.producers.connection import derive_keys, set_options

    keys = derive_keys(TOKEN, is_producer=False)
    peer = inputs.stack.enter_context(zmq.Context.instance().socket(zmq.DEALER))
    set_options(peer, keys, most_bytes=2**20)
    peer.curve_serverkey = keys.other
    peer.connect(f"tcp://127.0.0.1:{address[1]}")
    if opens:
        from megatron.runtime.feed.producers.produced_items import describe_data_set

        graph, texts = ModelGraph.from_dict(MODEL), TextSettings("ByteTokenizer")
        peer.send_multipart([b"0", describe_data_set(graph, inputs.manifest, texts=texts, options=IndexOptions(64)).encode()])
    for number in range(1, 4):
        peer.send_multipart([b"%d" % number, request])


def _meet_impostor(inputs: Inputs, *, answer: Message, first: Message = [b'{"ahead": 4}', b""]) -> None:  # noqa: B006
    """Have the run use somebody who knows the token, and answers all requests alike but the first of a connection."""
    import zmq

    from megatron.runtime.feed.producers.connection import derive_keys, set_options

    router = zmq.Context.instance().socket(zmq.ROUTER)
    set_options(router, derive_keys(TOKEN, is_producer=True), most_bytes=2**26)
    router.curve_server = True
    port = router.bind_to_random_port("tcp://127.0.0.1")
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            if router.poll(100):
                peer, number, *_ = router.recv_multipart()
                router.send_multipart([peer, number, *(first if number == b"0" else answer)])
        router.close(0)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    inputs.stack.callback(thread.join)
    inputs.stack.callback(is_over.set)
    _name_producer(inputs, address=f"127.0.0.1:{port}")
