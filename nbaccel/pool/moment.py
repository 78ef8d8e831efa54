"""The notebook's namespace at one moment: the fingerprints of what is in it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from torch import nn

from nbaccel.pool import digests
from nbaccel.pool.digests import Fingerprint
from nbaccel.pool.modules import Modules, Opaque, Record, State, Survey, attributes_of
from nbaccel.pool.travel import Place, Reducer, travels_by_value

__all__ = ["Moment"]


class Moment:
    """What was looked at is not looked at again: nothing changes between two cells' preparations.

    It keeps what it has seen alive, so it must not be kept itself.
    """

    def __init__(self, namespace: Mapping[str, Any], modules: Modules) -> None:
        self._namespace = namespace
        self._modules = modules
        self._surveys: dict[str, Survey] = {}
        self._states: dict[str, State] = {}
        self._table: dict[int, Place] | None = None
        self._owners: dict[int, tuple[str, nn.Module]] | None = None
        self._path = ""
        self.news = 0
        """How many modules got a key since this moment began."""

    # ------------------------------------------------------------------- values

    def fingerprint(self, name: str, value: Any) -> Fingerprint:
        """What identifies the value that has this name.

        Raises:
            Exception: Whatever pickling raised.
        """
        self._path = name
        if isinstance(value, nn.Module):
            place = self.place(value)
            if place is not None:
                return Fingerprint(("module", *place), modules=frozenset((place[0],)))
        token = digests.plain(value)
        return Fingerprint(token) if token is not None else self._of_pickle(value)

    def _of_pickle(self, value: Any) -> Fingerprint:
        return digests.of_pickle(value, Reducer(self._namespace, self.place), self.stand_ins())

    def stand_ins(self) -> dict[int, Any]:
        """Host copies of the storages that modules have on devices."""
        return {k: v for record in self._modules.all() for k, v in record.stand_ins.items()}

    # ------------------------------------------------------------------- modules

    def place(self, obj: Any) -> Place | None:
        """Where in a module with a key this is. Modules get one when they are first met."""
        is_module = isinstance(obj, nn.Module)
        record = self._modules.record_of(obj) if is_module else None
        if record is not None:
            return self._current(record).key, ""
        if self._table is None:
            self._table = self.table([self._current(r) for r in self._modules.all()])
        found = self._table.get(id(obj))
        if found is None and is_module:
            self._add(obj, self._path)
            return self._table[id(obj)]
        if found is None and isinstance(obj, nn.Parameter):
            return self._of_owner(obj)
        return found

    def table(self, records: Iterable[Record]) -> dict[int, Place]:
        """The places of all parts of these modules; of several, the one that was there first."""
        table: dict[int, Place] = {}
        records = list(records)
        for record in reversed(records):
            table.update(self.survey(record.key).places(record.key))
        for record in records:
            table[id(record.module)] = (record.key, "")
        return table

    def survey(self, key: str) -> Survey:
        """What the module consists of."""
        if key not in self._surveys:
            record = self._modules.by_key(key)
            module = record.module if record is not None else None
            self._surveys[key] = Survey.of(module) if module is not None else Survey((), ())
        return self._surveys[key]

    def state(self, key: str) -> State:
        """What may change in the module, as it is."""
        if key not in self._states:
            record = self._modules.by_key(key)
            self._path = record.path if record is not None else key
            self._states[key] = self._look(key, self.survey(key))
        return self._states[key]

    def _current(self, record: Record) -> Record:
        """This record, or that of the structure which its module has now."""
        if record.key in self._surveys:
            return record
        module = record.module
        if module is None:
            return record
        survey = Survey.of(module)
        if survey.structure() != record.structure:
            return self._add(module, record.path, survey)
        self._surveys[record.key] = survey
        return record

    def _add(self, module: nn.Module, path: str, survey: Survey | None = None) -> Record:
        survey = survey or Survey.of(module)
        record = self._modules.add(module, path, survey)
        self._surveys[record.key] = survey
        self.news += 1
        if self._table is not None:
            places = dict(survey.places(record.key))
            self._table = places | self._table | {id(module): (record.key, "")}
        return record

    def _of_owner(self, parameter: nn.Parameter) -> Place | None:
        """Its place in a module that the user has, so that an optimizer steps that module."""
        if self._owners is None:
            self._owners = {
                id(tensor): (name, value)
                for name, value in list(self._namespace.items())
                if isinstance(value, nn.Module)
                for tensor in value.parameters()
            }
        name, owner = self._owners.get(id(parameter), ("", None))
        if owner is None or self._table is None:
            return None
        self._add(owner, name)
        return self._table.get(id(parameter))

    def _look(self, key: str, survey: Survey) -> State:
        names: set[str] = set()
        modules: set[str] = set()

        def token(value: Any) -> Hashable:
            found = digests.plain(value)
            if found is not None:
                return found
            try:
                pickled = self._of_pickle(value)
            except Exception:  # pickling runs user code: anything may come out of it
                return Opaque(value)
            names.update(pickled.names)
            modules.update(pickled.modules)
            return pickled.token

        attributes = {
            path: {name: token(value) for name, value in attributes_of(module)}
            for path, module in survey.modules
        }
        kinds = dict.fromkeys(type(module) for _, module in survey.modules)
        return State(
            requires_grad=tuple(tensor.requires_grad for _, tensor in survey.tensors),
            training=tuple(module.training for _, module in survey.modules),
            attributes=attributes,
            classes={kind: token(kind) for kind in kinds if travels_by_value(kind)},
            versions=survey.versions(),
            names=frozenset(names),
            modules=frozenset(modules - {key}),
        )
