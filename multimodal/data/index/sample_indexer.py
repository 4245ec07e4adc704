"""Indexes single samples, in any process: their tokens, and the tokens of their items in the LLM."""

import gc
import math
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Literal, NamedTuple

import numpy as np

from multimodal.data.audio import audio_grid, read_audio_length, sound_grid
from multimodal.data.chat.chat_format import ChatFormat
from multimodal.data.conversation import (
    GeneratedSegment,
    ItemSegment,
    Segment,
    TextSegment,
    build_conversation,
    find_item_behind_text,
)
from multimodal.data.forms.sample_files import SampleFiles
from multimodal.data.forms.segments import EMBEDDED, FileSegment, SegmentedSample
from multimodal.data.image_files import (
    SOUND,
    FramePlace,
    ManifestPaths,
    VideoLength,
    check_image_size,
    frame_address,
    parse_frame_address,
    read_image_size,
    read_video_length,
)
from multimodal.data.image_processing import image_grid, num_tiles, video_grid
from multimodal.data.index.item_reader import VIDEO_BLOCK, item_inputs
from multimodal.data.index.sample_index import IndexedItem, IndexedSample, SampleIndex, build_index
from multimodal.data.remote import BLOCK, Value, data_path
from multimodal.data.sample_source import DEFAULT_MAX_PIXELS, NUM_FRAMES, Overlong
from multimodal.data.tokenizer import Tokenizer
from multimodal.values.errors import DataError
from multimodal.values.model_graph import AudioInput, ImageInput, ModelGraph, Role, Unit
from multimodal.values.sample_lengths import count_llm_tokens


@dataclass(frozen=True)
class IndexOptions:
    """Options that an index depends on, beside data, model and tokenizer."""

    seq_length: int
    needs_items_first: bool = False
    """Images must come before the text of their sample, as --attention-mask prefix requires."""
    allows_outside_paths: bool = False
    """Image files may lie outside the manifest's folder (`ManifestPaths`)."""
    media_dir: str | None = None
    """The folder, or address, in which they are in place of the manifest's."""
    max_image_pixels: int = DEFAULT_MAX_PIXELS
    """The largest image (width x height of its file) that is decoded."""
    overlong: Overlong = "truncate"
    """Cut samples of more tokens at the end (`build_conversation`), leave them out, or raise DataError."""
    skips_bad: bool = False
    """Leave out samples with items that are missing or cannot be read, in place of DataError."""
    num_frames: int = NUM_FRAMES
    """The most frames that are taken of a video."""
    video_fps: float | None = None
    """Frames that are taken of a second of video; None: as many as there may be."""
    video_max_pixels: int | None = None
    """The most pixels of a frame once it is scaled; None: as the model says."""
    video_sound: bool = False
    """Videos are heard, too, by the model's only encoder of sound."""


_LEAST_FRAMES = 4
"""Frames that video processors of Qwen's models take of a second or less, if a video has them."""
BLOCK_SIZE = 4096
"""Samples whose index is made at a time."""
MOST_PROCESSES = 32

BAD = "that cannot be read: "
"""How the reason begins for which such a sample is left out."""


class _Part(NamedTuple):
    """The items of one place of a sample."""

    items: Sequence[IndexedItem]
    """Tiles of an image, steps of a video, or a clip alone."""
    times: tuple[str, ...] = ()
    """Texts before each step, if these stand alone."""


class SampleIndexer:
    """Indexes samples in this process."""

    def __init__(
        self, graph: ModelGraph, *, files: SampleFiles, tokenizer: Tokenizer, chat: ChatFormat | None, options: IndexOptions
    ) -> None:
        """files: the data set, for images that are part of it; chat: writes conversations by a model's template."""
        self._graph, self._files, self._tokenizer, self._chat, self._options = graph, files, tokenizer, chat, options
        self._item_encoders, self._inputs = graph.item_encoders, item_inputs(graph)
        folder = data_path(options.media_dir) if options.media_dir else files.folder
        self._paths = ManifestPaths(folder, allows_outside=options.allows_outside_paths)

    def index_all(self, samples: Iterable[SegmentedSample]) -> Iterator[SampleIndex]:
        """Index block after block: the first in this process, others on all of its cores."""
        with _rare_collections():
            blocks = gather(samples, weight=lambda sample: 1, most=BLOCK_SIZE)
            yield from map(self.index_block, islice(blocks, 1))
            if (second := next(blocks, None)) is None:
                return
            num_processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
            # Forked, so that each has the tokenizer and the template as they are.
            with ProcessPoolExecutor(num_processes, multiprocessing.get_context("fork"), _adopt, (self,)) as pool:
                waiting = deque[Future[SampleIndex]]()
                for found in _submitted(pool, chain((second,), blocks)):
                    waiting.append(found)
                    if len(waiting) > 2 * num_processes:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()

    def index_block(self, samples: Iterable[SegmentedSample]) -> SampleIndex:
        """Return the index of these samples; raises DataError for the first faulty one."""
        samples = [*samples]
        measured = self._files.at_once(self._measure, samples)
        return build_index(map(self._index, samples, measured))

    def _measure(self, sample: SegmentedSample) -> list[list[_Part]] | str | DataError:
        """Return what each item of a sample becomes, the reason for leaving it out, or what is wrong with it."""
        found: list[tuple[FileSegment, Unit]] = []
        for segment in sample.segments:
            if not isinstance(segment, TextSegment):
                unit = self._unit_of(segment, where=sample.where)
                if unit is None:
                    kind = f"{segment.kind}s".replace("audios", "audio")
                    return f"with {kind}{f' for {segment.unit!r}' if segment.unit else ''}, which no unit of the model takes"
                found.append((segment, unit))
        try:
            return [self._index_segment(segment, unit, where=sample.where) for segment, unit in found]
        except DataError as problem:
            return f"{BAD}{problem}" if self._options.skips_bad else problem

    def _index(self, sample: SegmentedSample, parts_of: list[list[_Part]] | str | DataError) -> IndexedSample | str:
        """Return the sample, or the reason for leaving it out; raises DataError for a faulty one."""
        if isinstance(parts_of, DataError):
            raise parts_of
        if isinstance(parts_of, str):
            return parts_of
        places = iter([[_item_segment(part, graph=self._graph) for part in parts] for parts in parts_of])
        segments = [*chain.from_iterable([each] if isinstance(each, TextSegment) else next(places) for each in sample.segments)]
        if self._chat is not None:
            conversation = self._chat.build(segments, seq_length=self._options.seq_length, where=sample.where)
        else:
            conversation = build_conversation(segments, tokenizer=self._tokenizer, seq_length=self._options.seq_length)
        items = [*chain.from_iterable(part.items for part in chain.from_iterable(parts_of))]
        if conversation.is_cut and self._options.overlong == "skip":
            return f"of more than {self._options.seq_length} tokens (--overlong skip)"
        if conversation.is_cut and self._options.overlong == "error":
            raise DataError(
                f"{sample.where}: more than {self._options.seq_length} tokens; raise --seq-length, shorten the sample (videos: "
                "--num-frames, --video-max-pixels), or give --overlong truncate or skip"
            )
        if not conversation.num_target_tokens:
            return f"without a target token among the first {self._options.seq_length} (seq_length)"
        if self._options.needs_items_first and (behind := find_item_behind_text(conversation)) is not None:
            raise DataError(
                f"{sample.where}: {items[behind].path} stands behind text, but --attention-mask prefix has images before all of "
                "a sample's text; put the images first there, or use --attention-mask embedded"
            )
        if sample.loss_weight != 1:
            conversation = replace(conversation, loss_weight=sample.loss_weight)
        return IndexedSample(sample.where, conversation, tuple(items[: len(conversation.item_starts)]))

    def _unit_of(self, segment: FileSegment, *, where: str) -> Unit | None:
        """Return the unit that takes or makes an item; raises DataError if the item does not name one of several."""
        is_sound = segment.kind == "audio"
        made = [unit for unit in self._graph.generators if unit.image is not None and unit.makes_sound == is_sound]
        taken = [unit for unit in self._item_encoders if (unit.audio if is_sound else unit.image) is not None]
        fitting = made if segment.is_answer and segment.kind != "video" and made else taken
        if segment.unit is not None:
            return next((unit for unit in fitting if unit.name == segment.unit), None)
        if len(fitting) > 1:
            names = [unit.name for unit in fitting]
            raise DataError(
                f'{where}: {segment.path} might be for any of the units {", ".join(names)}; say for which: "unit": "{names[0]}"'
            )
        return fitting[0] if fitting else None

    def _index_segment(self, segment: FileSegment, unit: Unit, *, where: str) -> list[_Part]:
        """Return what a segment becomes: a clip, an image, every frame of a video, or a video; and its sound."""
        found = self._inputs[unit.name]
        is_embedded = segment.path.startswith(EMBEDDED)
        path = segment.path if is_embedded else self._paths.resolve(segment.path, where=where)
        name, length = f"its {'sound' if segment.kind == 'audio' else segment.kind}" if is_embedded else path, None
        block = VIDEO_BLOCK if segment.kind == "video" else BLOCK
        content = None if segment.size else self._files.open_item(path, block=block, where=where)
        if segment.kind == "audio":
            size = read_audio_length(name, content=content, where=where), 1
        else:
            if segment.kind == "video":
                length = read_video_length(name, content=content, where=where)
                size = length.size
            else:
                size = segment.size or read_image_size(name, content=content, where=where)
            check_image_size(name, size=size, max_pixels=self._options.max_image_pixels, where=where)
        try:
            if isinstance(found, AudioInput):
                return [_Part([IndexedItem(unit.name, path, size, audio_grid(size[0], audio=found))])]
            if unit.makes_sound:
                return [_Part([IndexedItem(unit.name, path, size, sound_grid(size[0], image=found))])]
            if length is not None:
                sound = self._index_sound(path, length.num_samples) if self._options.video_sound else []
                return [*self._index_video(path, length, unit=unit.name, image=found), *sound]
            grid = image_grid(width=size[0], height=size[1], image_input=found)
            tiles = range(num_tiles(width=size[0], height=size[1], image_input=found))
            return [_Part([IndexedItem(unit.name, path, size, grid, tile) for tile in tiles])]
        except DataError as problem:
            raise DataError(f"{where}: {name}: {problem}, or remove that line") from problem

    def _index_video(self, path: str, length: VideoLength, *, unit: str, image: ImageInput) -> list[_Part]:
        """Return a video's frames, each with its tiles, or all of its steps."""
        frames = choose_frames(length, image=image, most=self._options.num_frames, fps=self._options.video_fps)
        (width, height), video = length.size, image.video
        most = self._options.video_max_pixels
        grid = video_grid(width=width, height=height, num_frames=len(frames), image_input=image, max_pixels=most)
        if video is None:
            tiles = range(num_tiles(width=width, height=height, image_input=image))
            found = [frame_address(FramePlace(path, (frame,), len(frames))) for frame in frames]
            return [_Part([IndexedItem(unit, each, length.size, grid, tile) for tile in tiles]) for each in found]
        per_step = image.num_frames
        frames += frames[-1:] * (-len(frames) % per_step)
        steps = [tuple(frames[first : first + per_step]) for first in range(0, len(frames), per_step)]
        addresses = [frame_address(FramePlace(path, step, length.num_frames)) for step in steps]
        if video.has_timestamps:
            seconds = [(step[0] / length.fps + step[-1] / length.fps) / 2 for step in steps]
            items = [IndexedItem(unit, address, length.size, grid) for address in addresses]
            return [_Part(items, tuple(f"<{time:.1f} seconds>" for time in seconds))]
        seconds_between = np.float32(per_step / (len(frames) / length.num_frames * length.fps))
        numbers = np.arange(len(steps), dtype=np.float32)
        if video.tokens_per_second is not None and video.ends_at_last_time:  # rounded as transformers do in each
            numbers = numbers * seconds_between * video.tokens_per_second
        elif video.tokens_per_second is not None:
            numbers = numbers * (seconds_between * video.tokens_per_second)
        times = numbers.astype(np.int64).tolist()
        places = zip(addresses, times, strict=True)
        return [_Part([IndexedItem(unit, address, length.size, (*grid, time)) for address, time in places])]

    def _index_sound(self, path: str, num_samples: int) -> list[_Part]:
        """Return the sound of a video; nothing of a silent one."""
        (unit,) = (unit for unit in self._item_encoders if unit.audio is not None)
        assert unit.audio is not None
        grid = audio_grid(num_samples, audio=unit.audio) if num_samples else None
        return [] if grid is None else [_Part([IndexedItem(unit.name, path + SOUND, (num_samples, 1), grid)])]


Indexing = Callable[[SampleIndexer, Iterable[SegmentedSample]], Iterator[SampleIndex]]
"""Yields the index of samples in order, block by block; the indexer indexes those that nothing else can. Raises DataError for the
first faulty sample."""


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python look for circles of objects less often, here and in processes forked inside: samples are in none."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


_adopted: list[SampleIndexer] = []
"""In a process of `index_all`: its indexer."""


def _adopt(indexer: SampleIndexer) -> None:
    gc.freeze()  # collections here would touch, and so copy, what the process was forked with
    end_with_parent()
    _adopted.append(indexer)


def end_with_parent() -> None:
    """Let a process of a pool end when the one that it works for is killed, which it would not notice."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _index_block(samples: list[SegmentedSample]) -> SampleIndex:
    return _adopted[0].index_block(samples)


def _submitted(pool: ProcessPoolExecutor, blocks: Iterable[list[SegmentedSample]]) -> Iterator[Future[SampleIndex]]:
    """Yield what will be the index of each block; a reading error comes behind all of them."""
    try:
        for block in blocks:
            yield pool.submit(_index_block, block)
    except DataError as problem:
        failed = Future[SampleIndex]()
        failed.set_exception(problem)
        yield failed


def gather(values: Iterable[Value], *, weight: Callable[[Value], int], most: int) -> Iterator[list[Value]]:
    """Yield values in lists of about this weight; an error is raised after all values before it."""
    gathered: list[Value] = []
    total = 0
    try:
        for value in values:
            gathered.append(value)
            total += weight(value)
            if total >= most:
                yield gathered
                gathered, total = [], 0
    except DataError:
        if gathered:
            yield gathered
        raise
    if gathered:
        yield gathered


def choose_frames(length: VideoLength, *, image: ImageInput, most: int, fps: float | None) -> list[int]:
    """Return the frames that are taken of a video, at most so many, or so many of a second of it.

    Of a model that takes single frames, as numbers of equal parts of the time, of which there are as many as frames; of others as
    numbers of frames, chosen as by the video processor of the model: by that of Qwen3-VL from the first to the last one, by that
    of Qwen2-VL in equal steps from the first one, in pairs.
    """
    total, video, group = length.num_frames, image.video, image.num_frames
    if video is None:
        wanted = max(1, round(length.seconds * fps)) if fps else most
        return [*range(min(wanted, most, total))]
    wanted_of_time = max(total / length.fps * fps, _LEAST_FRAMES) if fps else most
    if video.has_timestamps:
        number = max(1, min(int(wanted_of_time), most, total))
        return np.linspace(0, total - 1, number).round().astype(int).tolist()  # type: ignore[no-any-return]
    number = group * max(1, min(math.floor(wanted_of_time / group), most // group, total // group))
    return [index * total // number for index in range(number)]


def _item_segment(part: _Part, *, graph: ModelGraph) -> Segment:
    """Return a part of a sample as its LLM tokens."""
    tiles, times = part
    unit = graph.unit(tiles[0].unit)
    if unit.role is Role.GENERATOR:
        return GeneratedSegment("audio" if unit.makes_sound else "image")
    num_output_tokens = sum(count_llm_tokens(graph, unit, tile.grid) for tile in tiles)
    row_length = tiles[0].grid[1] + 1 if unit.image is not None and unit.image.has_row_ends else None
    place, is_step = parse_frame_address(tiles[0].path), unit.image is not None and unit.image.video is not None
    kind: Literal["image", "audio", "video"] = "video" if place and is_step else "image" if unit.audio is None else "audio"
    return ItemSegment(num_output_tokens, kind, num_tiles=len(tiles), row_length=row_length, times=times)
