"""Make spoken samples to learn from: strings of digits, held out by their voice, or prompts of a telephone exchange.

python examples/speech/make_sounds.py --packages DIR --output runs/speech/digits [--prompts]

DIR holds what scripts/quickstart_speech.sh downloads. Digits to train on are spoken by espeak-ng (of the Python package
espeakng-loader); those held out are recordings of a person, Asterisk's speaker, whom no other sample has.
"""

import argparse
import ctypes
import gzip
import json
import math
import random
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
from make_models import find
from scipy.signal import resample_poly

RATE = 8000
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MOST_DIGITS = 7
NUM_HELD_OUT = 40
NUM_STRINGS = 1800
NUM_JOINED = 2400
"""Samples that are made of several prompts, as Asterisk itself makes sentences of them: what comes next is only to be heard."""
LONGEST_SECONDS = 8.0
LONGEST_JOINED_SECONDS = 5.0
PAUSE = 0.2
"""Seconds behind each prompt that is joined."""
VOICES = (
    *("en-us", "en-us+f1", "en-us+f4", "en-us+m8", "en-us+m1", "en-us+m2", "en-us+m3", "en-us+m5", "en-us+m7"),
    *("en-us+klatt2", "en-us+klatt4", "en-us+Andrea", "en-us+Annie", "en-us+anika", "en-us+aunty", "en-us+belinda"),
    *("en-us+linda", "en-us+Michael", "en-us+shelby", "en-us+steph"),
)
"""Of espeak-ng: those that say the same each time."""
PACES = ((150, 50), (190, 65))
"""Words a minute and pitch in percent, each of all voices."""
Voice = Sequence[np.ndarray]
"""Clips of the ten digits."""


class Sample(NamedTuple):
    """Something said: values from -1 to 1 at RATE."""

    name: str
    transcript: str
    sound: np.ndarray


def main() -> None:
    """Write train.jsonl, held_out.jsonl and their sounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", action="store_true", help="prompts in place of digits")
    options = parser.parse_args()
    random.seed(1)
    with tempfile.TemporaryDirectory() as scratch:
        train, held_out = (make_prompts if options.prompts else make_digits)(options.packages, Path(scratch))
    write(options.output, "train", train)
    write(options.output, "held_out", held_out)


def make_digits(packages: Path, scratch: Path) -> tuple[list[Sample], list[Sample]]:
    """Return strings of digits to train on, and others in the voice of a person who says none of those."""
    voices, folder = list(speak_digits()), unpack_sounds(packages, scratch) / "digits"
    unseen = [trim(read_sound(folder / f"{digit}.wav")) for digit in range(10)]
    train = [say_digits(random.choice(voices), f"train/{index}", speeds=range(17, 24)) for index in range(NUM_STRINGS)]
    return train, [say_digits(unseen, f"held_out/{index}", speeds=(20,)) for index in range(NUM_HELD_OUT)]


def say_digits(voice: Voice, name: str, *, speeds: Sequence[int]) -> Sample:
    """Return one to seven random digits of a voice at one of some speeds, in twentieths of its own."""
    digits = random.choices(range(10), k=random.randint(1, MOST_DIGITS))
    sound = join([voice[digit] for digit in digits], pauses=[random.uniform(0.05, 0.3) for _ in digits])
    return Sample(name, " ".join(DIGITS[digit] for digit in digits), resample_poly(sound, 20, random.choice(speeds)))


def join(clips: Sequence[np.ndarray], *, pauses: Sequence[float]) -> np.ndarray:
    """Return clips one behind the other, with so many seconds of silence behind each."""
    silences = [np.zeros(round(RATE * pause), np.float32) for pause in pauses]
    return np.concatenate([part for pair in zip(clips, silences, strict=True) for part in pair])


def trim(sound: np.ndarray) -> np.ndarray:
    """Return a clip at half of full volume, without the silence at its ends."""
    sound = sound / (2 * np.abs(sound).max())
    loud = np.flatnonzero(np.abs(sound) > 0.01)
    return sound[loud[0] : loud[-1] + 1]


def read_sound(path: Path) -> np.ndarray:
    """Return a file as values from -1 to 1 at RATE."""
    return to_rate(*soundfile.read(path, dtype="float32"))


def to_rate(sound: np.ndarray, rate: int) -> np.ndarray:
    """Return a clip of another rate at RATE."""
    common = math.gcd(RATE, rate)
    return resample_poly(sound, RATE // common, rate // common)


def speak_digits() -> Iterator[Voice]:
    """Yield the digits as each voice of espeak-ng says them at each pace."""
    import espeakng_loader

    espeak, found = ctypes.CDLL(espeakng_loader.get_library_path()), []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def keep(values: Any, num_values: int, events: int | None) -> int:
        if values and num_values:
            found.append(np.ctypeslib.as_array(values, (num_values,)).copy())
        return 0

    synchronous, speed, pitch, is_utf8 = 2, 1, 3, 1
    rate = espeak.espeak_Initialize(synchronous, 0, str(espeakng_loader.get_data_path()).encode(), 0)
    espeak.espeak_SetSynthCallback(keep)
    for voice in VOICES:
        for words_a_minute, percent in PACES:
            if espeak.espeak_SetVoiceByName(voice.encode()):
                raise SystemExit(f"espeak-ng has no voice {voice}; install the version that scripts/quickstart_speech.sh names")
            espeak.espeak_SetParameter(speed, words_a_minute, 0)
            espeak.espeak_SetParameter(pitch, percent, 0)
            clips = []
            for text in (digit.encode() for digit in DIGITS):
                found.clear()
                espeak.espeak_Synth(text, len(text) + 1, 0, 0, 0, is_utf8, None, None)
                clips.append(trim(to_rate(np.concatenate(found).astype(np.float32), rate)))
            yield clips


def unpack_sounds(packages: Path, scratch: Path) -> Path:
    """Return the folder of Asterisk's recordings."""
    subprocess.run(["dpkg-deb", "-x", find(packages, "asterisk-core-sounds-en-wav_*.deb"), scratch], check=True)
    (root,) = (path for path in (scratch / "usr/share/asterisk/sounds").iterdir() if path.is_dir())
    return root


def make_prompts(packages: Path, scratch: Path) -> tuple[list[Sample], list[Sample]]:
    """Return prompts, alone and joined, to train on, and others whose transcripts are not among theirs."""
    prompts = list(read_prompts(packages, scratch))
    candidates = [prompt for prompt in prompts if len(prompt.transcript.split()) >= 3]
    chosen = {prompt.transcript.lower() for prompt in random.sample(candidates, NUM_HELD_OUT)}
    train = [prompt for prompt in prompts if prompt.transcript.lower() not in chosen]
    held_out = [prompt for prompt in prompts if prompt.transcript.lower() in chosen]
    return train + [join_prompts(train, f"joined/{index}") for index in range(NUM_JOINED)], held_out


def read_prompts(packages: Path, scratch: Path) -> Iterator[Sample]:
    """Yield the prompts that are speech, and not too long."""
    root = unpack_sounds(packages, scratch)
    subprocess.run(["dpkg-deb", "-x", find(packages, "asterisk-core-sounds-en_*.deb"), scratch], check=True)
    (listed,) = scratch.rglob("core-sounds-en.txt.gz")
    for line in gzip.decompress(listed.read_bytes()).decode().splitlines():
        name, _, transcript = line.partition(":")
        path, transcript = root / f"{name.strip()}.wav", transcript.strip()
        if not transcript or name.startswith(";") or "[" in transcript or not path.is_file():
            continue
        sound = read_sound(path)
        if len(sound) <= LONGEST_SECONDS * RATE:
            yield Sample(name.strip(), transcript, sound)


def join_prompts(prompts: Sequence[Sample], name: str) -> Sample:
    """Return one to four prompts, a tenth slower, as they are or a tenth faster, in no more than some seconds."""
    parts: list[Sample] = []
    for prompt in random.sample(prompts, random.choice((1, 2, 3, 4))):
        if not parts or sum(len(part.sound) for part in (*parts, prompt)) <= LONGEST_JOINED_SECONDS * RATE:
            parts.append(prompt)
    sound = join([part.sound for part in parts], pauses=[PAUSE] * len(parts))
    return Sample(name, " ".join(part.transcript for part in parts), resample_poly(sound, 10, random.choice((9, 10, 11))))


def write(folder: Path, name: str, samples: Sequence[Sample]) -> None:
    """Write NAME.jsonl, and the sounds that it names."""
    lines = []
    for sample in samples:
        path = folder / "sounds" / f"{sample.name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, sample.sound, RATE, subtype="PCM_16")
        sound = {"type": "audio", "audio": str(path.relative_to(folder))}
        messages = [{"role": "user", "content": [sound]}, {"role": "assistant", "content": sample.transcript}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
