"""IPython in a worker: its syntax, magics and formatters, and nothing that waits for input.

    cell ──► transform (%, !, ?) ──► parse ──► compile ──► run ──► display hook ──► bundle
                     └── lines keep their numbers: frames name the line that the user sees

An error is not printed here but raised, so that the notebook reports it once for all ranks. The
imports include what a shell imports when it is made: workers forked from here make theirs at once.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import linecache
import re
import sys
import tokenize
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from IPython.core import completer, completerlib, magics, oinspect, page  # noqa: F401  (see above)
from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Instance, Type, default
from traitlets.config import Config

from nbaccel.base import frames, ipython_private
from nbaccel.base.errors import InputRefused, UserMistake
from nbaccel.calls.pool_planning import CellSource
from nbaccel.workers import worker_output
from nbaccel.workers.messaging import Completions
from nbaccel.workers.worker_output import without_widgets

_TIMED_FILE_NAMES = ("<timed exec>", "<timed eval>")  # how %%time calls what it compiles

# Of magics, commands and help anywhere in a line, and of quoted calls at its start.
_MAGIC_SIGNS = re.compile(r"[%!?]|^\s*[,;/]", re.MULTILINE)

_TRUSTED_NAMES = {("torch", "nn"), ("numpy",), ("pandas",), ("torch", "Tensor")}


class _LineKeepingTransformer(TransformerManager):
    """Keeps the number of lines: IPython joins those of a command that goes on on the next one."""

    _of_ipython = TransformerManager().token_transformers  # type: ignore[no-untyped-call]

    def do_token_transforms(self, lines: list[str]) -> list[str]:
        """Leave code alone that has nothing of IPython's syntax, without reading it by tokens."""
        if self.token_transformers == self._of_ipython and not _MAGIC_SIGNS.search("".join(lines)):
            return lines
        return list(super().do_token_transforms(lines))  # type: ignore[no-untyped-call]

    def do_one_token_transform(self, lines: list[str]) -> tuple[bool, list[str]]:
        has_changed, new_lines = super().do_one_token_transform(lines)  # type: ignore[no-untyped-call]
        num_missing = len(lines) - len(new_lines)
        if num_missing > 0:
            first = 0
            while first < len(new_lines) - 1 and lines[first] == new_lines[first]:
                first += 1
            new_lines = [*new_lines[: first + 1], *["\n"] * num_missing, *new_lines[first + 1 :]]
        return has_changed, new_lines


class _CellCompiler(CachingCompiler):
    """Compiles under the name and the line numbers that a cell has in the notebook."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._source: CellSource | None = None
        self._lines_above: dict[str, int] = {}
        self._is_timed = False

    def begin(self, source: CellSource) -> None:
        """From now on, this cell is compiled."""
        self._source = source
        self._lines_above = {}
        self._is_timed = False
        source.publish()
        if source.count is not None:
            ipython_private.number_cell(self, source.filename, source.count)

    def learn(self, raw: str, transformed: str) -> None:
        """Remember where in the cell a piece stands: all of it, or what is below a `%%` line."""
        source = self._source
        piece = raw.rstrip()
        whole = source.text.rstrip() if source is not None else ""
        if source is None or not piece or not whole.endswith(piece):
            return
        text_above = whole[: len(whole) - len(piece)]
        # IPython removes empty lines at the top before it compiles.
        num_blank = len(piece) - len(piece.lstrip())
        lines = text_above.count("\n") + piece[:num_blank].count("\n")
        self._lines_above[transformed] = source.first_line - 1 + lines

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        if self._source is not None and transformed_code in self._lines_above:
            return self._source.filename
        return super().cache(transformed_code, number, raw_code)

    def ast_parse(self, source: str, filename: str = "<unknown>", symbol: str = "exec") -> ast.AST:
        lines = self._lines_above.get(source)
        if lines is None or self._source is None:
            return super().ast_parse(source, filename, symbol)
        self._is_timed = filename != self._source.filename
        try:
            tree = super().ast_parse(source, self._source.filename, symbol)
        except SyntaxError as error:
            error.lineno = (error.lineno or 1) + lines
            if error.end_lineno:
                error.end_lineno += lines
            raise
        return ast.increment_lineno(tree, lines)

    def __call__(self, source: Any, filename: str, symbol: str, *more: Any, **options: Any) -> Any:
        if self._is_timed and self._source is not None and filename in _TIMED_FILE_NAMES:
            filename = self._source.filename
        return super().__call__(source, filename, symbol, *more, **options)


class _BundleHook(DisplayHook):
    """Keeps the value of the last expression for the notebook instead of printing it."""

    shell: Any
    bundle: dict[str, Any] | None = None
    text: str = ""  # the cell's code

    def take(self) -> dict[str, Any] | None:
        """The value, once."""
        bundle, self.bundle = self.bundle, None
        return bundle

    def write_output_prompt(self) -> None:
        """The notebook writes it, once for all ranks."""

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        # With InteractiveShell.ast_node_interactivity = "all" a cell has several values.
        if (earlier := self.take()) is not None:
            self.shell.display_pub.publish(**earlier)
        self.bundle = {"data": without_widgets(format_dict), "metadata": md_dict or {}}

    def quiet(self) -> bool:
        """Whether a semicolon behind the expression says that it is not to be shown."""
        if ";" not in self.text:
            return False
        # Lines of IPython's own syntax do not tokenize.
        with contextlib.suppress(tokenize.TokenError, SyntaxError):
            ends_so: bool = self.semicolon_at_end_of_expression(self.text)  # type: ignore[no-untyped-call]
            return ends_so
        return False

    def log_output(self, format_dict: Any) -> None:
        """Keep nothing: IPython would keep every picture for ever."""

    def finish_displayhook(self) -> None:
        self._is_active = False


class WorkerShell(InteractiveShell):
    """The one shell of a worker process."""

    compile: _CellCompiler
    compiler_class = Type(_CellCompiler)
    displayhook_class = Type(_BundleHook)
    input_transformer_manager = Instance(_LineKeepingTransformer, ())

    def __init__(self, *, rank: int, publisher: type[Any]) -> None:
        config = Config()
        self._rank = rank
        self._loop: asyncio.AbstractEventLoop | None = None
        self._raised: BaseException | None = None
        self._errors: list[BaseException] = []
        # History would open a database and start a thread that writes it.
        config.HistoryManager.enabled = False
        config.HistoryManager.hist_file = ":memory:"
        # Jedi takes half a second for the first completion.
        config.IPCompleter.use_jedi = False
        super().__init__(config=config, display_pub_class=publisher)  # type: ignore[no-untyped-call]
        # Only the last three values are kept: older ones would hold on to memory.
        self.displayhook.do_full_cache = False
        ipython_private.keep_no_prints(self)
        for name, kind in (("debug", "line"), ("debug", "cell"), ("pdb", "line")):
            manager: Any = self.magics_manager
            manager.register_function(_no_debugger(name, rank), magic_kind=kind, magic_name=name)

    # ---- what a worker does without

    def init_profile_dir(self, profile_dir: Any) -> None:
        """Use no folder; what %cd and others store is kept in memory."""
        if isinstance(getattr(InteractiveShell, "db", None), property):
            self.db = {}
        # IPython 8 needs the folder at once.
        else:
            super().init_profile_dir(profile_dir)  # type: ignore[no-untyped-call]

    def init_virtualenv(self) -> None:
        """The import path is the notebook's."""

    def init_prompts(self) -> None:
        """Have none: libraries take a process with prompts for one that somebody types in."""

    def init_hooks(self) -> None:
        """What a pager would show is displayed."""
        super().init_hooks()  # type: ignore[no-untyped-call]
        self.set_hook("show_in_pager", page.as_hook(page.display_page), 90)  # type: ignore[no-untyped-call]

    def init_completer(self) -> None:
        """Set up completion."""
        super().init_completer()  # type: ignore[no-untyped-call]
        ipython_completer: Any = self.Completer
        if ipython_completer.has_trait("policy_overrides"):  # IPython 9
            # A module has its parameters and children by `__getattr__`, which IPython mistrusts.
            ipython_completer.policy_overrides = {
                "allowed_getattr_external": _TRUSTED_NAMES,
                "allowed_getitem_external": _TRUSTED_NAMES,
            }

    def ask_exit(self) -> NoReturn:
        """`exit` in a cell."""
        raise SystemExit(0)

    def enable_gui(self, gui: str | None = None) -> None:
        """Only figures in the cell can be drawn."""
        if gui not in (None, "inline", "agg"):
            raise UserMistake(
                f"%matplotlib or %gui asked for {gui!r}, but worker {self._rank} has no screen to "
                "open a window on. Use %matplotlib inline: figures then appear in the cell."
            )

    # ---- running

    def run(self, source: CellSource) -> dict[str, Any] | None:
        """Run a cell."""
        self.compile.begin(source)
        hook: _BundleHook = self.displayhook  # type: ignore[assignment]
        # A value of a cell that failed must not be shown by this one.
        hook.take()
        hook.text = source.text
        if source.count is not None:
            self.execution_count = source.count
        self._errors = []
        self._raised = None
        result = self.run_cell(source.text, store_history=False)
        errors, self._errors = self._errors, []
        self._raised = None
        if not errors:
            return hook.take()
        # An error in a cycle keeps its frames, and all tensors in them, until some collection.
        result.error_before_exec = result.error_in_exec = self.last_execution_result = None
        # The innermost run of a %% magic comes first, and is what the others fail by.
        error = errors[-1] if isinstance(errors[-1], KeyboardInterrupt) else errors[0]
        try:
            raise _from_the_cell(error)
        finally:
            # The frame is part of the error's traceback: the cycle would keep its tensors alive.
            del error, errors

    def run_cell(self, *args: Any, **options: Any) -> Any:
        """As IPython's; an error of it, also where a `%%` magic calls it, fails the whole cell."""
        result = super().run_cell(*args, **options)  # type: ignore[no-untyped-call]
        # No variable holds the error: the cycle with this frame would keep its tensors alive.
        if result.error_before_exec is not None:
            self._errors.append(result.error_before_exec)
        elif result.error_in_exec is not None:
            self._errors.append(result.error_in_exec)
        return result

    async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> bool:
        """Run compiled code; what it raises is raised, SystemExit too."""
        try:
            if async_:
                await eval(code_obj, self.user_global_ns, self.user_ns)  # noqa: S307  (a cell)
            else:
                exec(code_obj, self.user_global_ns, self.user_ns)  # noqa: S102  (a cell)
        except BaseException as error:  # only noted: `run` raises it to the worker
            self._raised = error
            raise
        return False

    @default("loop_runner")
    def _cell_loop_runner(self) -> Callable[[Coroutine[Any, Any, Any]], Any]:
        return self._run_coroutine

    def _run_coroutine(self, cell_coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a cell with `await` in it. Tasks that it leaves go on in the next such cell."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        task = self._loop.create_task(cell_coroutine)
        try:
            return self._loop.run_until_complete(task)
        # Such as an interrupt while every task was waiting, which is not raised in the task.
        except BaseException as error:  # whatever it is, the task must end
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    self._loop.run_until_complete(task)
            self._raised = error
            raise

    def transform_cell(self, raw_cell: str) -> str:
        """Turn IPython's syntax into Python's."""
        cell = str(super().transform_cell(raw_cell))  # type: ignore[no-untyped-call]
        self.compile.learn(raw_cell, cell)
        return cell

    # ---- what is asked of names

    def completions_at(self, code: str, cursor: int) -> Completions:
        """What could stand at the cursor, by what this worker's names are bound to."""
        with completer.provisionalcompleter():
            completions = list(
                completer.rectify_completions(code, self.Completer.completions(code, cursor))
            )
        if not completions:
            return Completions(matches=(), start=cursor, end=cursor, types=())
        return Completions(
            matches=tuple(completion.text for completion in completions),
            start=completions[0].start,
            end=completions[0].end,
            types=tuple(completion.type or "" for completion in completions),
        )

    def describe(self, name: str, detail: int) -> dict[str, str] | None:
        """What `name?` shows, or `name??` for detail 1; None if there is no such thing."""
        try:
            return dict(self.object_inspect_mime(name, detail_level=detail))  # type: ignore[no-untyped-call]
        except KeyError:
            return None

    # ---- errors that IPython shows instead of raising them

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        """Print what does not end the cell, such as the error of a formatter."""
        error = sys.exc_info()[1] if exc_tuple is None else exc_tuple[1]
        if error is self._raised or isinstance(error, (SyntaxError, asyncio.CancelledError)):
            return
        frame = inspect.currentframe()
        module = frame.f_back.f_globals.get("__name__", "") if frame and frame.f_back else ""
        if error is not None and module.startswith("IPython.core.magics."):
            # IPython 8's %%time prints the error of its cell and reports success.
            self._errors.append(error)
        else:
            super().showtraceback(exc_tuple, *args, **options)

    def showsyntaxerror(self, *args: Any, **options: Any) -> None:
        """`run` raises it."""


def _from_the_cell(error: BaseException) -> BaseException:
    """The error, with a traceback that begins in the user's code."""
    if isinstance(error, SyntaxError):
        if not error.text and error.filename and error.lineno:
            error.text = linecache.getline(error.filename, error.lineno) or None
        return error.with_traceback(None)
    entry = error.__traceback__
    while entry is not None:
        file = entry.tb_frame.f_code.co_filename
        if file != __file__ and "/IPython/core/" not in file:
            break
        entry = entry.tb_next
    return error.with_traceback(entry)


def _no_debugger(name: str, rank: int) -> Callable[..., NoReturn]:
    def refuse(line: str = "", cell: str | None = None) -> NoReturn:
        raise InputRefused(
            f"%{name} in worker {rank} has no keyboard to listen to. Print what is to be seen; to "
            "step through code, run it in a cell of the notebook itself."
        )

    return refuse


def make_shell(send: Callable[[Any], None], *, rank: int) -> WorkerShell:
    """Make the shell of this process, not a forked kernel's, for cells in `__main__`."""
    worker_output.text_bars()
    worker_output.forget_shells(InteractiveShell)
    worker_output.mute_comms()
    # A forked kernel's hook would send results to the browser; the shell sets one around a cell.
    sys.displayhook = sys.__displayhook__
    publisher = worker_output.publisher_class(send)
    shell: WorkerShell = WorkerShell.instance(rank=rank, publisher=publisher)
    warnings.formatwarning = _format_warning
    worker_output.connect_inline_figures(shell)
    return shell


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """A warning with the place as a notebook's user knows it, and the line of code."""
    frame = frames.Frame(file=filename, line=lineno, function="")
    code = line.strip() if line else frames.source_line(frame)
    text = f"{frames.place(frame)}: {category.__name__}: {message}\n"
    return text + (f"  {code}\n" if code else "")
