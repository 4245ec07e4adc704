"""Everything that can be wrong with a sample, a list or a file, whatever its form: file and line are named, and the fix."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from multimodal.values.errors import DataError
from tests.unit.data.conftest import DataFolder

ASK, SAY = {"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "cats"}
USER, ASSISTANT = {"role": "user", "content": "what?"}, {"role": "assistant", "content": "cats"}
ANSWER = {"type": "text", "role": "assistant", "text": "yes"}
DOCUMENT = {"type": "text", "role": "document", "text": "a"}


def sized(path: str, width: Any, height: Any = 8) -> dict[str, Any]:
    return {"segments": [{"type": "image", "path": path, "width": width, "height": height}, ANSWER]}


def called(path: Any) -> dict[str, Any]:
    return {"segments": [{"type": "image", "path": path}]}


def shown(image: Any, *turns: Any) -> dict[str, Any]:
    return {"image": image, "conversations": list(turns or (ASK, SAY))}


def asked(content: Any, **beside: Any) -> dict[str, Any]:
    return {**beside, "messages": [{"role": "user", "content": content}, ASSISTANT]}


SIZES = "width and height must be positive whole numbers, found"
NO_OBJECT = "not a complete JSON object"
LINES: list[tuple[str | bytes, str]] = [
    ('{"id": "x", "segments": [{"type": "te', f"{NO_OBJECT} .* restore it or remove it"),
    ("[1, 2]", "expected a JSON object, found list"),
    (b"\xff", NO_OBJECT),
    (b'{"id": "x", "segments": [{"type": "text", "role": "user", "text": "caf\xe9"}]}', f"{NO_OBJECT} .*utf-8"),
    (b"[" * 100_000, f"{NO_OBJECT} .*recursion"),
    ('{"id": "x", "segments": ' + "[" * 5000 + "]" * 5000 + "}", f"{NO_OBJECT}|expected a JSON object with a"),
    (b'{"id": 1' + b"0" * 5000 + b', "segments": []}', f"{NO_OBJECT} .*4300 digits"),
    ('{"id": "x", "segments": [{"type": "image", "path": "a.png", "width": NaN, "height": 8}]}', "found nan and 8"),
]
SEGMENTS: list[tuple[dict[str, Any], str]] = [
    ({"id": "s1", "segments": [ANSWER]}, "the id 's1' is already that of line [12]; give every sample an id of its own"),
    ({"id": True, "segments": [ANSWER]}, "'id' must be text or a number, found bool"),
    ({"id": None, "segments": [ANSWER]}, "'id' must be text or a number, found NoneType"),
    ({"id": "x"}, r"\(sample 'x'\): the key 'segments' is missing"),
    (sized("a.png", True), f"{SIZES} True and 8"),
    (sized("a.png", -8), f"{SIZES} -8 and 8"),
    (sized("a.png", 8.0), f"{SIZES} 8.0 and 8"),
    (sized("a.png", "8"), f"{SIZES} '8' and 8"),
    (sized("a.png", -(10**400)), f"{SIZES} a number of 1329 bits and 8"),
    (sized("a.png", 0, 3), f"{SIZES} 0 and 3"),
    ({"segments": [{"type": "image", "path": "a.png", "width": 3}]}, f"{SIZES} 3 and None"),
    (sized("gone.png", 8), r"gone\.png does not exist; restore the file or remove that line"),
    (sized("a.png", 12000, 12000), r"a\.png has 12,000 x 12,000 pixels, but .* raise --max-image-pixels"),
    (sized("a.png", 10**400), r"a\.png has more than 10\^15 x 8 pixels, but no more than"),
    (sized("text.png", 8, 1608), r"text\.png: an image of 8x1608 pixels is more than 200 times .*remove that line"),
    (called(3), "'path' must be text, found int"),
    (called(""), "no file can be called ''"),
    (called("a\0.png"), r"no file can be called 'a\\x00\.png'; correct 'path'"),
    (called("\ud800.png"), r"no file can be called '\\ud800\.png'; correct 'path'"),
    (called(".."), r"\.\. does not exist"),
    (called("text.png"), r"text\.png cannot be decoded as an image"),
    ({"segments": [{"type": "image", "path": "a.png", "role": "asistant"}]}, "unknown role 'asistant'; use one of .* system, or"),
    ({"segments": {}}, "'segments' must be a list, found dict"),
    ({"segments": []}, "'segments' is empty"),
    ({"segments": ["text"]}, "segment 0: expected a JSON object with a 'type', found str"),
    ({"segments": [ANSWER, {"type": "film"}]}, "segment 1: unknown segment type 'film'; use one of text, image, audio, video"),
    ({"segments": [ANSWER, {"type": "video"}]}, "segment 1: the key 'path' is missing"),
    ({"segments": [{"role": "user", "text": ""}]}, "the key 'type' is missing"),
    ({"segments": [{"type": "text", "role": "user"}]}, "the key 'text' is missing"),
    ({"segments": [{"type": "text", "text": "a"}]}, "the key 'role' is missing"),
    ({"segments": [{**DOCUMENT, "role": "tool"}]}, "unknown role 'tool'; use one of user, assistant, document, system"),
    ({"segments": [{**DOCUMENT, "text": 3}]}, "'text' must be text, found int"),
    ({"segments": [{"type": "image", "width": 3, "height": 3}]}, "the key 'path' is missing"),
    ({"segments": [{**DOCUMENT, "path": "a.png"}]}, "segment 0: unknown key 'path'"),
    ({"segments": [DOCUMENT], "images": ["a.png"]}, "unknown key 'images'"),
]
CHATS: list[tuple[Any, str]] = [
    ({"segments": [ANSWER]}, "the key 'id' is missing; found 'segments'"),
    ({"image": "a.png", "conversations": []}, "'conversations' is empty; give the sample a question"),
    ({"messages": []}, "'messages' is empty"),
    ({"messages": {}}, "'messages' must be a list, found dict"),
    (shown("a.png", {"from": "human", "value": "what?"}, SAY), "1 images are listed, but .* for 0 alone"),
    ({"conversations": [ASK, SAY]}, r"conversations\[0\]: a place for image .*lists no more of them"),
    (shown("gone.png"), "gone.png does not exist; restore the file"),
    (shown("../a.png"), r"\.\./a.png does not exist|is not in the manifest's folder"),
    (shown("text.png"), "text.png cannot be decoded as an image"),
    (shown(7), "image must be the path of a file, found 7"),
    (shown("http://a/b.png"), "is no path of a file, and nothing is downloaded"),
    (shown(""), "no file can be called ''"),
    (shown('\0[0, "image"]'), r"no file can be called '\\x00\[0, \"image\"\]'"),
    (shown("a.png", SAY, ASK), "out of order: a message of the assistant comes first, .*system or the user"),
    ({"messages": [USER, USER]}, r"messages\[1\]: roles out of order: a message of the user follows the user's, .*assistant"),
    ({"messages": [USER, {"role": "system", "content": "a"}]}, r"messages\[1\]: roles out of order"),
    ({"system": "a", "messages": [{"role": "system", "content": "b"}, USER, ASSISTANT]}, r"messages\[0\]: roles out of order"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "unknown role 'tool'; use one of system, user"),
    ({"messages": [USER]}, "the assistant never answers"),
    ({"messages": ["a"]}, r"messages\[0\]: expected an object with 'role' and 'content', found str"),
    ({"messages": [{"role": "user"}]}, "the key 'content' is missing"),
    (asked(3), "'content' must be text or a list, found int"),
    (asked(["a"]), r"content\[0\]: expected an object with a 'type', found str"),
    (asked([{"type": "film"}]), r"content\[0\]: unknown type 'film'; use text, image, audio, video"),
    (asked([{"type": "audio"}]), r"content\[0\]: a place for audio .*'audios'\); list it"),
    (asked([{"type": "video", "video": "a.mp4", "fps": 1}]), r"content\[0\]: unknown key 'fps'"),
    (asked([{"type": "audio", "audio": {"array": [0]}}]), "no path of a file in 'type', "),
    (asked("<audio>what?", audios=["a.wav", "b.wav"]), "2 audios .* for 1"),
    (asked("what?", videos=["a.mp4"]), "1 videos are listed, but there are places .*<video>.* for 0"),
    (asked("<video>what?", videos=[["a.png", "b.png"]]), "video must be the path of a file"),
    (asked("<video>what?", videos=["text.png"]), r"text\.png cannot be decoded as a video .*; give another file"),
    (asked("what?", prompt="another"), "unknown key 'prompt'"),
    ({"messages": [{**USER, "weight": 1}, ASSISTANT]}, r"messages\[0\]: unknown key 'weight'"),
    ({"messages": [USER, {**ASSISTANT, "weight": 0}]}, r"messages\[1\]: unknown key 'weight'"),
    (
        asked([{"type": "image", "index": number} for number in (1, 0)], images=["a.png", "a.png"]),
        r"content\[0\]: 'index' is 1, but this is place 0 for image; list the files in the order",
    ),
    (asked("what?", images=[{"path": "a.png", "url": "b"}]), "must be the path of a file, found {'path'"),
    *[
        (asked(f"{mark}what?"), re.escape(f"unknown mark {mark}"))
        for mark in ("<start_of_image>", "<IMG_CONTEXT>", "<|image_pad|>", "<img>", "<|AUDIO|>", "<image_1>")
    ],
    (asked("<|video|>what?"), r"messages\[0\]: unknown mark <\|video\|>, .*a part"),
    ({"messages": [USER, {**ASSISTANT, "content": "<image>"}]}, r"messages\[1\]: a place for image"),
    (asked("what?", tools="[]"), "unknown key 'tools', .*; remove it, or put it under 'metadata'"),
    (asked([{"type": "text", "text": "a", "image": "a.png"}]), "unknown key 'image'"),
    (asked([{"type": "image", "image": "a", "path": "b"}]), "unknown key '.*name one file"),
    ({"query": "a", "response": "b", "history": ["c"]}, "'history' must be a list of pairs"),
    ({"texts": [{"user": "a"}]}, "'texts' must be a list of pairs of 'user' and 'assistant'"),
    ({"texts": []}, "'messages' is empty"),
    ({"texts": ["a", None], "images": [None]}, "'texts' has 2 places, so 'images' must be a list of as many"),
    ({"texts": ["a", "b"], "images": [None, "a.png"]}, "place 1 must be either a text or an image"),
    ({"texts": ["a", None], "images": [None, "https://a.org/a.png"]}, "is no path of a file, and nothing is downloaded"),
    ({"texts": [None], "images": ["a.png"]}, "the document has no text"),
    (
        {"text_list": ["a"], "image_info": [{"image_name": "a.png", "matched_text_index": 1}]},
        r"image_info\[0\] must have .* below 1",
    ),
    ({"text_list": [None]}, r"text_list\[0\] must be a text"),
    ({"text": "a", "image": "a.png"}, "unknown key 'image'"),
    ({"question": "a"}, "the key 'id' is missing; found 'question'; .*'id' and 'segments' .*'messages' .*'conversations'"),
    ("text", "expected a JSON object, found str"),
]


@pytest.mark.parametrize(
    ("sample", "message"), [*LINES, *[({"id": "x", **sample}, message) for sample, message in SEGMENTS], *CHATS]
)
def test_a_wrong_sample_is_named(data: DataFolder, sample: Any, message: str) -> None:
    """With its file and line, in JSON lines and in a list; each in one line, however long the sample."""
    data.image("a.png", (8, 8))
    (data.path / "text.png").write_text("no image")
    good = {"id": "s1", "segments": [ANSWER]}
    line = sample if isinstance(sample, bytes) or (sample, message) in LINES else json.dumps(sample)
    data.manifest([json.dumps(good), line])
    with pytest.raises(DataError, match=f"manifest.jsonl, line 2.*{message}") as caught:
        data.open(data.path)
    assert "\n" not in str(caught.value)
    if (sample, message) not in LINES:
        (data.path / "data.json").write_text(json.dumps([good, sample], indent=1))
        with pytest.raises(DataError, match=f"data.json, line {3 + json.dumps([good], indent=1).count(chr(10)) - 2}.*{message}"):
            data.open(data.path / "data.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{"messages": []', "data.json, line 2: not a complete JSON value .*; the list is cut off or damaged: restore it"),
        ('[\n\n3, {"a', "data.json, line 3: expected a JSON object, found int"),
        ('[\n{"a": \n', "data.json, line 2: not a complete JSON value .*; the list is cut off or damaged: restore it"),
        (f'[\n{{"id": 1, "segments": [{json.dumps(DOCUMENT)}]}}', "line 2: behind this entry of the list"),
        ("[]", "the manifest is empty"),
        ('[\n]\n[{"a": 1}]', r"data.json, line 3: '\[{\"a\": 1}\]' follows the list; join lists into one, or remove it"),
        (f'[{{"id": 1, "segments": [{json.dumps(DOCUMENT)}]}}] ]', "line 1: ']' follows the list"),
        ("question,answer\na,b\n", "data.json, line 1: is no JSON: it begins with 'question,answer'; give"),
        ('{"messages": [', "data.json, line 1: not a complete JSON object"),
        ("PK\x03\x04", "data.json: is a zip archive; unpack it, and give --data-path a manifest.jsonl, JSON lines"),
        (gzip.compress(b"{}", mtime=0), r"data.json, line 1: the manifest is compressed, expected JSON; unpack it first"),
    ],
)
def test_files_that_are_cut_off_or_of_another_form(data: DataFolder, text: str | bytes, message: str) -> None:
    path = data.path / "data.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message) as caught:
        data.open(path)
    assert "\n" not in str(caught.value)


def test_missing_and_empty_manifests(data: DataFolder) -> None:
    """Nothing there, nothing in it, nothing usable in it."""
    (data.path / "folder" / "manifest.jsonl").mkdir(parents=True)
    for wrong in ("gone.jsonl", "folder", "folder/manifest.jsonl"):
        with pytest.raises(DataError, match=rf"{Path(wrong).stem}.*\.jsonl: no such manifest; give --data-path"):
            data.open(data.path / wrong)
    with pytest.raises(DataError, match=r"manifest\.jsonl: the manifest is empty"):
        data.open([])
    clip = {"type": "audio", "path": "a.wav", "seconds": 1.0}
    with pytest.raises(DataError, match=r"no usable sample \(2 samples with audio"):
        data.open([[clip, ANSWER]] * 2)
