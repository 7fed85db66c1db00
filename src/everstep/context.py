"""Where a worker is in its run: ``get_context()``."""

from __future__ import annotations

from everstep.protocol import wire
from everstep.refusals import TuneContext


class StorageContext:
    """Where the run lives: what ``get_context().get_storage()`` gives."""

    def __init__(self, run_folder: str, name: str) -> None:
        self.experiment_fs_path = run_folder
        self.storage_fs_path = run_folder.rpartition("/")[0]
        self.experiment_dir_name = name

    def build_checkpoint_path_from_name(self, checkpoint_name: str) -> str:
        """Where a checkpoint of this name lies: for a ``checkpoint_upload_fn``."""
        return f"{self.experiment_fs_path}/{checkpoint_name}"


class TrainContext(TuneContext):
    """A worker's place in the run."""

    def __init__(self, spec: wire.WorkerSpec) -> None:
        self._spec = spec

    def get_experiment_name(self) -> str:
        """The run's name."""
        return self._spec.run_name

    def get_world_size(self) -> int:
        """The number of workers of this attempt."""
        return self._spec.member.world_size

    def get_world_rank(self) -> int:
        """This worker's rank among all, from 0."""
        return self._spec.member.rank

    def get_local_rank(self) -> int:
        """Its rank among the workers of its host, from 0."""
        return self._spec.member.local_rank

    def get_local_world_size(self) -> int:
        """The number of workers on its host."""
        return self._spec.member.local_world_size

    def get_node_rank(self) -> int:
        """The number of its host among the run's hosts, from 0."""
        return self._spec.member.node_rank

    def get_storage(self) -> StorageContext:
        """Where the run's folder is."""
        return StorageContext(self._spec.run_folder, self._spec.run_name)

    # Ours, beyond Ray Train's.

    def get_attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self._spec.epoch

    def get_restart_reason(self) -> str:
        """Why the workers were started this time."""
        return self._spec.reason

    def get_slice_id(self) -> int:
        """The number of its slice, from 0."""
        return self._spec.member.slice_id

    def get_num_slices(self) -> int:
        """The number of slices of this attempt."""
        return self._spec.member.num_slices

    def get_replica_group_id(self) -> int:
        """The number of its replica group, from 0."""
        return self._spec.member.group_id

    def get_num_replica_groups(self) -> int:
        """The number of replica groups; 1 where there are none."""
        return self._spec.member.num_groups

    def get_replica_group_rank(self) -> int:
        """Its rank in its replica group, from 0."""
        return self._spec.member.group_rank
