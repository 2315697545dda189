"""The mutants. ``tests/unit/test_mutants.py`` checks that each can still be planted."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A change of one place that makes the product wrong."""

    wrong: str
    """What goes wrong, in plain words."""
    file: str
    old: str
    """The code that is changed. It occurs once in the file."""
    new: str
    tests: tuple[str, ...]
    """The nearest tests, as pytest takes them: few, and quick."""


MUTANTS = (
    # ---------------------------------------------------------------------------------- boxes, slices, strides
    Mutant(
        "A flat slice that ends in the row in which it begins holds the rest of that row.",
        "pipeline/core/geometry.py",
        "return _within_row(first_row, head, tail, shape)",
        "return _within_row(first_row, head, row_elements, shape)",
        ("tests/unit/test_geometry.py::test_a_flat_range_is_cut_once_and_in_order_into_few_boxes",),
    ),
    Mutant(
        "Boxes that only touch meet: an op without elements, or a pair too many.",
        "pipeline/core/geometry.py",
        "meets = np.maximum(start[i], from_[j]) < np.minimum(stop[i], to[j])",
        "meets = np.maximum(start[i], from_[j]) <= np.minimum(stop[i], to[j])",
        ("tests/unit/test_geometry.py::test_boxes_without_elements_meet_nothing",),
    ),
    Mutant(
        "A tensor in Fortran order is read as if it were in C order.",
        "pipeline/core/geometry.py",
        "return tuple(stored[axes.index(dim)] for dim in range(len(shape)))",
        "return stored",
        ("tests/unit/test_geometry.py::test_strides_of_permuted_dims_are_those_of_numpy",),
    ),
    Mutant(
        "A slice that begins inside a tensor has its first element at the tensor's first byte.",
        "pipeline/model/placement.py",
        " for o, s in zip(offset, strides, strict=True)) - start * itemsize",
        " for o, s in zip(offset, strides, strict=True))",
        ("tests/unit/test_placement.py",),
    ),
    Mutant(
        "Fused parts of unequal size: a rank's second part begins where it would if it were as large as the first.",
        "pipeline/model/placement.py",
        "(end - length) * self.tp + rank * length, length)",
        "(end - length) * self.tp + rank * unit, length)",
        ("tests/unit/test_placement.py",),
    ),
    Mutant(
        "Fused parts: the step from rank to rank is that of a part as large as the first.",
        "pipeline/model/placement.py",
        "yield row, with_dim((0,) * MAX_DIMS, dim, length)",
        "yield row, with_dim((0,) * MAX_DIMS, dim, shards[0][2])",
        ("tests/unit/test_placement.py",),
    ),
    Mutant(
        "Of an array that holds the pieces of all ranks, each is taken to lie where that of rank 0 does.",
        "pipeline/model/placement.py",
        "(rank * piece[dim] + start, logical, length)",
        "(start, logical, length)",
        ("tests/unit/test_placement.py",),
    ),
    Mutant(
        "The last row of a box that is moved block by block is left out.",
        "tasks/boxes.py",
        "here = slice(low, min(low + rows, extents[0]))",
        "here = slice(low, min(low + rows, extents[0] - 1))",
        ("tests/unit/test_boxes.py::test_blocks_tile_a_box_once_and_in_order",),
    ),
    # -------------------------------------- comparisons of copies, and of parameters with their master weights
    Mutant(
        "Only the first block of a large strided box is compared with its replica.",
        "tasks/compare_group.py",
        "                return False\n            done += nbytes\n",
        "                return False\n            break\n",
        ("tests/unit/test_planning.py::test_a_changed_bit_is_found_in_every_block_of_a_large_strided_box",),
    ),
    Mutant(
        "Further blocks of a large box are compared with bytes of the first one.",
        "tasks/compare_group.py",
        "            done += nbytes\n",
        "",
        ("tests/unit/test_planning.py::test_a_changed_bit_is_found_in_every_block_of_a_large_strided_box",),
    ),
    Mutant(
        "Bytes between the columns of a box are compared instead of the columns.",
        "tasks/compare_group.py",
        " | (source_strides[:, dim] == run) & (target_strides[:, dim] == run)",
        " | (source_strides[:, dim] == run)",
        ("tests/unit/test_planning.py::test_a_changed_bit_is_found_in_every_block_of_a_large_strided_box",),
    ),
    Mutant(
        "What differs from its master weight hides that copies of it differ.",
        "tasks/compare_group.py",
        '("tensor", "kind", "source_file", "target_file"))',
        '("tensor", "source_file", "target_file"))',
        ("tests/unit/test_planning.py::test_no_difference_hides_another_of_other_files_tensors_or_kinds",),
    ),
    Mutant(
        "What differs in one file hides what differs in others.",
        "tasks/compare_group.py",
        '("tensor", "kind", "source_file", "target_file"))',
        '("tensor", "kind"))',
        ("tests/unit/test_planning.py::test_no_difference_hides_another_of_other_files_tensors_or_kinds",),
    ),
    Mutant(
        "A tensor that differs hides others that differ in the same files.",
        "tasks/compare_group.py",
        '("tensor", "kind", "source_file", "target_file"))',
        '("kind", "source_file", "target_file"))',
        ("tests/unit/test_planning.py::test_no_difference_hides_another_of_other_files_tensors_or_kinds",),
    ),
    Mutant(
        "An infinite parameter is equal to a master weight that is NaN.",
        "tasks/compare_group.py",
        "(values & 0x7FFF) > 0x7F80",
        "(values & 0x7FFF) >= 0x7F80",
        ("tests/unit/test_planning.py::test_infinity_is_no_nan",),
    ),
    Mutant(
        "The last elements of an array that the storage copies are not sampled.",
        "pipeline/planning/checks.py",
        "if 0 < run < RUNS - 1:",
        "if 0 < run:",
        ("tests/unit/test_checks.py::test_of_every_copied_array_the_ends_and_some_between_are_read[pp]",),
    ),
    Mutant(
        "Further copies of a tensor are not compared with the first if they are in several pieces.",
        "pipeline/planning/match.py",
        "copies = source.fragments[~first]",
        'copies = source.fragments[source.fragments["replica"] == 1]',
        ("tests/unit/test_match.py",),
    ),
    # ------------------------------------------------------------------------- each element once, none dropped
    Mutant(
        "A target with elements that nothing fills is planned.",
        "pipeline/planning/match.py",
        "wrong = np.flatnonzero(written != wanted)",
        "wrong = np.flatnonzero(written > wanted)",
        ("tests/unit/test_match.py",),
    ),
    Mutant(
        "A target with elements that are written twice is planned.",
        "pipeline/planning/match.py",
        "wrong = np.flatnonzero(written != wanted)",
        "wrong = np.flatnonzero(written < wanted)",
        ("tests/unit/test_match.py",),
    ),
    Mutant(
        "An optimizer state that the target does not hold is dropped in silence.",
        "pipeline/planning/match.py",
        'if described.state != "param" or master is None:',
        'if described.state != "param" and master is None:',
        ("tests/unit/test_match.py",),
    ),
    Mutant(
        "A cast that no option asks for is made.",
        "pipeline/planning/match.py",
        "not in {*_CASTS, *casts}:",
        "in casts:",
        ("tests/unit/test_match.py",),
    ),
    Mutant(
        "Two pieces of a tensor may overlap.",
        "pipeline/core/catalog.py",
        "overlaps = np.flatnonzero(i < j)",
        "overlaps = np.flatnonzero(i > i)",
        ("tests/unit/test_catalog.py::test_a_tensor_that_is_not_whole",),
    ),
    Mutant(
        "A piece may reach beyond its file.",
        "pipeline/core/catalog.py",
        '(stop > sizes[block["file"]])',
        '(start > sizes[block["file"]])',
        ("tests/unit/test_catalog.py::test_a_tensor_that_is_not_whole",),
    ),
    Mutant(
        "A plan that moves the rows of a box as its columns is proven complete.",
        "pipeline/planning/coverage.py",
        "return np.asarray(inside & alike.all(axis=1))",
        "return np.asarray(inside)",
        ("tests/unit/test_coverage.py::test_a_changed_plan_is_not_complete[model-a box turned]",),
    ),
    Mutant(
        "A plan with values of another tensor is proven complete.",
        "pipeline/planning/coverage.py",
        "wrong = (mixed | (tensor != read)) & ~np.isin(tensor * count + read, defined)",
        "wrong = mixed & ~np.isin(tensor * count + read, defined)",
        (
            "tests/unit/test_coverage.py"
            "::test_a_changed_plan_is_not_complete[model-values of a tensor of the same shape]",
        ),
    ),
    # --------------------------------------------------------------------------------------------------- casts
    Mutant(
        "Ties are rounded up, not to even.",
        "tasks/cast.py",
        "np.add(words, 0x7FFF, out=words)",
        "np.add(words, 0x8000, out=words)",
        ("tests/unit/test_cast.py::test_every_upper_half_around_its_ties",),
    ),
    Mutant(
        "A NaN is rounded to another NaN than Paddle's.",
        "tasks/cast.py",
        "words[nan] = 0x7FFF << 16",
        "words[nan] = 0x7FC0 << 16",
        ("tests/unit/test_cast.py::test_every_upper_half_around_its_ties",),
    ),
    Mutant(
        "Values too large for float16 become infinite.",
        "tasks/cast.py",
        "lost = np.isinf(converted) & np.isfinite(wide)",
        "lost = np.isnan(converted) & np.isfinite(wide)",
        ("tests/unit/test_cast.py::test_what_float16_cannot_hold",),
    ),
    # -------------------------------------------------------------------------- groups, padding, stages, names
    Mutant(
        "Stage 1 v2: a parameter is padded for one rank, not for all.",
        "pipeline/formats/sharding.py",
        "unit = ALIGNMENT_BYTES // dtype.itemsize * degree",
        "unit = ALIGNMENT_BYTES // dtype.itemsize",
        ("tests/unit/test_sharding_rules.py::test_stage1_v2_slices",),
    ),
    Mutant(
        "Stage 1 v2: a buffer is closed one parameter later where it is exactly full.",
        "pipeline/formats/sharding.py",
        "np.searchsorted(filled, before + limit_bytes)",
        'np.searchsorted(filled, before + limit_bytes, side="right")',
        ("tests/unit/test_sharding_rules.py::test_buffers_are_grouped_as_paddle_groups_them",),
    ),
    Mutant(
        "Stage 1 v1: parameters of one size are handed out last first.",
        "pipeline/formats/sharding.py",
        "sorted(order, key=elements.__getitem__, reverse=True)",
        "sorted(order, key=elements.__getitem__)[::-1]",
        ("tests/unit/test_sharding_rules.py::test_stage1_v1_owners",),
    ),
    Mutant(
        "States follow each other as those of the first accumulator do, whatever they are called.",
        "pipeline/formats/hybrid/ranks.py",
        "while again < stop and entries[at + again] == first[again] + ending:",
        "while again < stop:",
        (
            "tests/golden/test_parameter_names.py::"
            "test_a_state_is_that_of_the_parameter_that_it_names_wherever_it_stands",
        ),
    ),
    Mutant(
        "Stage 3: slices are not padded.",
        "pipeline/formats/sharding.py",
        "return -(-padded_elements(elements, dtype, 1) // degree)",
        "return -(-elements // degree)",
        ("tests/unit/test_sharding_rules.py::test_stage3_slices",),
    ),
    Mutant(
        "Uniform pipeline stages: the first ones are longer, not the last.",
        "pipeline/formats/jobs/segments.py",
        "if part > parts - extra else 0",
        "if part <= extra else 0",
        ("tests/unit/test_sharding_rules.py::test_segments_of_the_model_classes[4-3]",),
    ),
    Mutant(
        "Counters of parameter names begin at one.",
        "pipeline/model/model.py",
        "number = self._counters.get(counter, first)",
        "number = self._counters.get(counter, first + 1)",
        ("tests/golden/test_planned.py::test_the_plan_is_the_recorded_one[dense/fc_mp2pp2]",),
    ),
    # ------------------------------------------------------------------------------ checksums and fingerprints
    Mutant(
        "The length of a tensor does not count for its checksum.",
        "pipeline/core/crc.py",
        "return remainder ^ _of_zeros(nbytes)",
        "return remainder ^ _of_zeros(0)",
        ("tests/unit/test_sums.py::test_boxes_add_up_to_the_tensor",),
    ),
    Mutant(
        "Sums of groups are joined in a way that keeps common bits.",
        "tasks/sums.py",
        "so_far.remainder ^ addend.remainder",
        "so_far.remainder | addend.remainder",
        ("tests/unit/test_sums.py",),
    ),
    Mutant(
        "A tensor of which a part was added up has a fingerprint.",
        "pipeline/examine/fingerprint.py",
        "if found.elements != tensor.elements:",
        "if tensor.elements and not found.elements:",
        ("tests/unit/test_sums.py",),
    ),
    # ---------------------------------------------------------------------------- disks: flushed, then renamed
    Mutant(
        "The files of a target are not flushed before it is renamed: a power failure leaves holes in them.",
        "storage/local/target.py",
        "list(pool.map(sync, ",
        "list(pool.map(os.stat, ",
        ("tests/storage/test_power_failures.py",),
    ),
    Mutant(
        "The folders of a target are not flushed before it is renamed: a power failure leaves files out.",
        "storage/local/target.py",
        "                sync(staging.files / path)\n",
        "                os.stat(staging.files / path)\n",
        ("tests/storage/test_power_failures.py",),
    ),
    Mutant(
        "The session is removed before the rename is on the disk: a power failure leaves neither.",
        "storage/local/target.py",
        "            sync(self.root.parent)\n            self._remove_replaced()\n            session.remove()\n",
        "            self._remove_replaced()\n            session.remove()\n            sync(self.root.parent)\n",
        ("tests/storage/test_power_failures.py",),
    ),
    Mutant(
        "The session does not say that it publishes: what is left of it after the rename is resumed.",
        "storage/local/target.py",
        "            session.update(phase=Phase.PUBLISH)\n",
        "",
        ("tests/storage/test_power_failures.py",),
    ),
    Mutant(
        "Signals are older than the files that they signal.",
        "storage/local/target.py",
        "                os.utime(staging.files / path)\n",
        "                os.stat(staging.files / path)\n",
        ("tests/storage/test_power_failures.py",),
    ),
    Mutant(
        "The record of a session is not flushed before it replaces the one before.",
        "storage/session/staging.py",
        "    sync(new)\n",
        "",
        ("tests/storage/test_power_failures.py",),
    ),
    Mutant(
        "After a reboot parts are believed that were never flushed.",
        "storage/session/staging.py",
        "if session.record.boot != boot or not as_left:",
        "if not as_left:",
        ("tests/unit/test_ledger.py",),
    ),
    Mutant(
        "An average of a rank is not flushed before it is renamed.",
        "tasks/ema_worker.py",
        "        os.fsync(file.fileno())\n",
        "",
        ("tests/storage/test_power_failures.py",),
    ),
    # -------------------------------------------------------------------------------------- ledger and uploads
    Mutant(
        "A part that was never written is not missed.",
        "storage/session/ledger.py",
        "if missing := wanted.keys() - of_part.keys():",
        "if missing := of_part.keys() - wanted.keys():",
        ("tests/unit/test_ledger.py",),
    ),
    Mutant(
        "A part that is shorter than planned counts.",
        "storage/session/ledger.py",
        "if wanted.get(part) != receipt.nbytes or",
        "if part not in wanted or",
        ("tests/unit/test_ledger.py",),
    ),
    Mutant(
        "A line of the ledger without its end counts.",
        "storage/session/ledger.py",
        '            if not line.endswith(b"\\n"):\n                break\n',
        "",
        ("tests/resume/test_sessions.py::test_a_torn_line_of_the_ledger_does_not_count",),
    ),
    Mutant(
        "A session of another plan is resumed.",
        "storage/session/ledger.py",
        "if (reason := difference(earlier.identity, identity)) is not None:",
        "if (reason := difference(identity, identity)) is not None:",
        ("tests/unit/test_ledger.py",),
    ),
    Mutant(
        "A second conversion may write a target while another runs.",
        "storage/session/ledger.py",
        "    if owner is None:\n        return\n",
        "    if owner is None or permission.resume:\n        return\n",
        ("tests/unit/test_ledger.py",),
    ),
    Mutant(
        "The ETag of an uploaded part is compared, its size is not.",
        "storage/s3/target.py",
        "parts.get(number) == UploadedPart(receipt.nbytes, receipt.tag.strip('\"'))",
        "parts[number].tag == receipt.tag.strip('\"')",
        ("tests/unit/test_s3_uploads.py",),
    ),
    Mutant(
        "clean aborts uploads of other programs.",
        "storage/s3/target.py",
        "pending = tuple(each for each in strays if _is_upload_of(each[0], listed))",
        "pending = tuple(strays)",
        ("tests/unit/test_s3_uploads.py",),
    ),
    Mutant(
        "Parts that S3 refuses only when the upload is completed are planned.",
        "storage/s3/target.py",
        "any(size < SMALLEST_PART_BYTES for size in sizes[:-1])",
        "any(size < SMALLEST_PART_BYTES for size in sizes[:0])",
        ("tests/unit/test_s3_uploads.py",),
    ),
    Mutant(
        "A folder is replaced although a trainer has saved over some of its files.",
        "storage/replaceable.py",
        "if entry.size_bytes != listed.get(entry.path, entry.size_bytes)]",
        "if entry.path not in listed and entry.size_bytes]",
        ("tests/unit/test_replaceable.py",),
    ),
    # ---------------------------------------------------------------------------------------- averages and AOA
    Mutant(
        "The weight of new values is not rounded as the trainer's.",
        "tasks/ema.py",
        "return np.float32(decay), np.float32(1 - decay)",
        "return np.float32(decay), 1 - np.float32(decay)",
        ("tests/ema/test_async_ema.py::test_the_average_equals_paddles_arithmetic_bit_for_bit",),
    ),
    Mutant(
        "A skipped update is forgotten.",
        "tasks/ema.py",
        "        for decay in decays:\n            weight *= decay\n",
        "        weight *= decays[-1]\n",
        ("tests/ema/test_decisions.py::test_an_update_makes_up_for_those_that_were_skipped_before_it",),
    ),
    Mutant(
        "Parts that are concatenated begin one element late.",
        "pipeline/changes/aoa/values.py",
        "offset=with_dim(segment.offset, axis, low - start + filled),",
        "offset=with_dim(segment.offset, axis, at - start + filled),",
        ("tests/aoa/test_fused.py",),
    ),
    Mutant(
        "permute moves the elements, but not the pieces that they came in.",
        "pipeline/changes/aoa/values.py",
        "offset=_picked(s.offset, order))",
        "offset=s.offset)",
        ("tests/aoa/test_fused.py",),
    ),
    # ------------------------------------------------------------------------------------------------ watching
    Mutant(
        "A checkpoint that has changed since its conversion counts as converted.",
        "pipeline/watch/decisions.py",
        "if record.made_of == seen.source_stamp:",
        "if record.made_of:",
        ("tests/jobs/test_decisions.py",),
    ),
    Mutant(
        "A checkpoint that failed is tried for ever.",
        "pipeline/watch/decisions.py",
        "if record.failures > policy.retries:",
        "if record.failures > 1 << 20:",
        ("tests/jobs/test_decisions.py",),
    ),
    Mutant(
        "Other source files make the same target.",
        "pipeline/watch/decisions.py",
        '        "source": source.get("files"),\n',
        "",
        ("tests/jobs/test_decisions.py",),
    ),
    Mutant(
        "A checkpoint is converted while the trainer still writes it.",
        "pipeline/watch/looking.py",
        "return merging(files) or lacking(files, before)",
        "return merging(files)",
        (
            "tests/jobs/test_watch_once.py::test_a_growing_checkpoint_is_converted_when_its_last_file_is_there",
        ),
    ),
    Mutant(
        "What the trainer changed during the conversion is published all the same.",
        "pipeline/watch/watcher.py",
        "return digest(self.run.files(name)) != record.source_stamp",
        "return not digest(self.run.files(name))",
        ("tests/jobs/test_watch_once.py::test_a_file_that_appears_during_the_conversion_takes_it_back",),
    ),
    Mutant(
        "--keep removes a target that somebody has made by hand.",
        "pipeline/watch/watcher.py",
        "elif record.state is State.DONE and record.plan_id ==",
        "elif record.state in (State.DONE, State.ADOPTED) and record.plan_id ==",
        (
            "tests/jobs/test_watch_once.py"
            "::test_keep_does_not_touch_a_conversion_that_was_replaced_or_adopted",
        ),
    ),
    # ----------------------------------------------------------- what others wrote, and what a target may hold
    Mutant(
        "Of experts that a file holds as one tensor the gate is read as the up projection.",
        "pipeline/formats/huggingface/source.py",
        '("gate_proj", "up_proj") if match',
        '("up_proj", "gate_proj") if match',
        ("tests/golden/test_folders_as_found.py::test_experts_as_the_library_keeps_them_are_read",),
    ),
    Mutant(
        "A small file that is too large is read as an empty one.",
        "storage/plain.py",
        "    if size_bytes > most_bytes:\n",
        "    if not size_bytes:\n",
        (
            "tests/hostile/test_opened_places.py::test_a_manifest_beside_targets_is_not_waited_for[three gigabytes]",
        ),
    ),
    Mutant(
        "A pipe where a small file should be is waited for, and a link followed.",
        "storage/plain.py",
        "UNWAITING = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC",
        "UNWAITING = os.O_CLOEXEC",
        ("tests/hostile/test_opened_places.py::test_a_log_is_not_appended_to_a_link_or_a_pipe",),
    ),
    Mutant(
        "A header of safetensors may be of any size.",
        "storage/files/safetensors.py",
        "if header_bytes > MAX_HEADER_BYTES:",
        "if header_bytes > MAX_HEADER_BYTES << 40:",
        ("tests/hostile/test_safetensors_attacks.py::test_every_attack_is_stopped_for_its_reason",),
    ),
    Mutant(
        "An export carries files that no reader of models knows.",
        "pipeline/checkpoint/sidecars.py",
        "reason_not_carried(path) or without_role(path)",
        "reason_not_carried(path)",
        ("tests/golden/test_small_files.py",),
    ),
    # ---------------------------------------------------------------------------- more of the same
    Mutant(
        "Slices of other lengths than ranks must hold are accepted: files of two ranks were exchanged.",
        "pipeline/formats/hybrid/sharding_group.py",
        "if held != wanted:",
        "if held.keys() != wanted.keys():",
        ("tests/unit/test_sharding_group.py",),
    ),
    Mutant(
        "The slice of every rank is taken for that of the first.",
        "pipeline/formats/hybrid/sharding_group.py",
        "start, stop = expected[stored.shard]",
        "start, stop = expected[min(expected)]",
        ("tests/properties/test_conversions.py::test_a_shared_head_lies_last_in_the_buffers_of_its_chunk",),
    ),
    Mutant(
        "A tensor whole on a rank is taken with those like it, whichever rank model_meta.json names.",
        "pipeline/formats/hybrid/whole.py",
        "(self._owner[lone.key] == shard)",
        "(self._owner[lone.key] >= shard - shard)",
        ("tests/hostile/test_refused_checkpoints.py",),
    ),
    Mutant(
        "Two ranks of a group may hold a tensor that only one can.",
        "pipeline/formats/hybrid/sharding_group.py",
        "fits = len(arrays) == 1 or",
        "fits = len(arrays) >= 1 or",
        ("tests/unit/test_sharding_group.py",),
    ),
    Mutant(
        "A part that arrived altered at S3 is believed.",
        "storage/s3/uploads.py",
        "if taken.md5 and taken.md5 != md5.hex():",
        "if not taken.tag:",
        ("tests/unit/test_s3_uploads.py",),
    ),
    Mutant(
        "An upload to S3 is completed with its parts one number too high.",
        "storage/s3/uploads.py",
        "enumerate(receipts, 1)",
        "enumerate(receipts, 2)",
        ("tests/unit/test_s3_uploads.py",),
    ),
    Mutant(
        "S3 is asked to copy one byte more than the part has.",
        "storage/s3/uploads.py",
        "last_byte = copy.source_offset + copy.nbytes - 1",
        "last_byte = copy.source_offset + copy.nbytes",
        ("tests/unit/test_s3_uploads.py",),
    ),
    Mutant(
        "S3 copies from whatever the source has become.",
        "storage/s3/uploads.py",
        'condition = {"CopySourceIfMatch": v} if (v := source.stamps[copy.source_path].version) else {}',
        "condition = {}",
        ("tests/unit/test_s3_uploads.py",),
    ),
    Mutant(
        "A unit of work that the first of two targets has recorded is not done for the second.",
        "storage/outputs.py",
        "units = set.intersection(*(set(of_target) for of_target in records)) if records else set()",
        "units = set(records[0]) if records else set()",
        ("tests/unit/test_ledger.py",),
    ),
    Mutant(
        "In a store signals appear before what they signal.",
        "storage/remote/target.py",
        "        names = [name for name in self.files if not is_marker(name)]\n",
        "        names = [*self.files]\n",
        ("tests/storage/test_power_failures.py",),
    ),
    Mutant(
        "Of a target that is replaced the manifest, which lists the others, is removed first.",
        "storage/replaceable.py",
        "key=lambda path: (path == MANIFEST, path)",
        "key=lambda path: (path != MANIFEST, path)",
        ("tests/unit/test_replaceable.py",),
    ),
    Mutant(
        "The weights of the average so far and of the new values are exchanged.",
        "pipeline/convert/series.py",
        "*[(keep, take)] * (count - 1)",
        "*[(take, keep)] * (count - 1)",
        ("tests/ema/test_series.py::test_the_last_checkpoint_with_the_average_of_all[tp=1-None]",),
    ),
    Mutant(
        "A checkpoint that is still written counts as damaged.",
        "pipeline/watch/looking.py",
        "if settled and not (error.retryable or error.unfinished):",
        "if not error.retryable:",
        (
            "tests/jobs/test_watch_once.py::test_a_growing_checkpoint_is_converted_when_its_last_file_is_there",
        ),
    ),
    Mutant(
        "Sums of runs are joined as if all runs were next to each other.",
        "pipeline/core/crc.py",
        "        step_bytes *= 2\n",
        "",
        ("tests/unit/test_sums.py::test_remainders_in_a_row",),
    ),
)
