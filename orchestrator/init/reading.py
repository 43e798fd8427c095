"""What a Python file defines, read from its syntax tree; nothing of it is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Constant = int | float | str | bool


@dataclass(frozen=True)
class Call:
    """A call of something that has a name."""

    name: str
    """Dotted, and written out by the file's imports: `torch.optim.AdamW`."""
    line: int
    keywords: Mapping[str, Constant]
    """Those arguments that are plain numbers or words."""
    others: tuple[str, ...] = ()
    """The names of further ones."""


@dataclass(frozen=True)
class Function:
    name: str
    line: int
    required: tuple[str, ...]
    """The arguments that it cannot be called without."""
    returned: tuple[str, ...]
    """What it returns, a name for each member of a tuple: of the class or function that makes it, as far as that is written down.
    An empty name where it is not."""


@dataclass(frozen=True)
class Class:
    name: str
    line: int
    bases: tuple[str, ...]
    required: tuple[str, ...]
    """The arguments that it cannot be made without."""
    made_in_it: frozenset[str]
    """What its methods call."""
    forward: tuple[Call, ...] | None
    """The calls of its `forward`; None where it has none of its own."""
    item_keys: tuple[str, ...] | None
    """The keys of the dictionary that its `__getitem__` returns; None where that returns none."""


@dataclass(frozen=True)
class Module:
    name: str
    """As it is imported."""
    path: Path
    classes: tuple[Class, ...] = ()
    functions: tuple[Function, ...] = ()
    calls: tuple[Call, ...] = ()
    """All of the file."""
    imported: Mapping[str, str] = field(default_factory=dict)
    """What each name stands for that the file imports."""
    is_script: bool = False
    """Something is done when it is run: at its import, or below `if __name__ == "__main__"`."""
    runs_at: int | None = None
    """The line at which an import would begin to train or the like, as no `if __name__ == "__main__"` is around it; None where there is
    none."""


def read_module(path: Path, name: str) -> Module:
    """Return what a file defines. Raises ValueError, with the line, where it is no Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:  # ValueError: it has a null byte
        raise ValueError(f"line {getattr(error, 'lineno', None) or 1}: {error}") from error
    imported = _imported(tree, name, is_package=path.name == "__init__.py")
    names = _Names(name, imported | _defined(tree, name))
    return Module(
        name,
        path,
        tuple(_class(node, names) for node in tree.body if isinstance(node, ast.ClassDef)),
        tuple(_function(node, names) for node in tree.body if isinstance(node, ast.FunctionDef)),
        tuple(names.calls(tree)),
        imported,
        _runs_at(tree) is not None
        or any(isinstance(one, ast.If) and "__name__" in ast.unparse(one.test) for one in tree.body),
        _runs_at(tree),
    )


@dataclass
class _Names:
    """What the names of a file stand for."""

    module: str
    dotted: dict[str, str]
    local: dict[str, str] = field(default_factory=dict)
    """The variables of a function, by what was called to make them."""

    def of(self, node: ast.AST | None) -> str:
        """Return the dotted name of an expression; of a call that of what is called. Empty where it has none."""
        match node:
            case ast.Name(id=name):
                return self.local.get(name) or self.dotted.get(name, "")
            case ast.Attribute(value=value, attr=attribute):
                return f"{before}.{attribute}" if (before := self.of(value)) else ""
            case ast.Call(func=function):
                return self.of(function)
            case ast.Subscript(value=value):
                return self.of(value)
            case ast.Constant(value=str(text)):  # an annotation in quotation marks
                return self.dotted.get(text, "")
            case _:
                return ""

    def calls(self, tree: ast.AST) -> Iterator[Call]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (name := self.of(node.func)):
                values = {one.arg: _constant(one.value) for one in node.keywords if one.arg}
                plain = {key: value for key, value in values.items() if value is not None}
                yield Call(name, node.lineno, plain, tuple(key for key in values if key not in plain))


def _constant(node: ast.expr) -> Constant | None:
    """Return a plain number or word, with its sign; None of anything else."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):  # no literal, or one that cannot be made: `{[]: 1}`
        return None
    return value if isinstance(value, Constant) else None


def _imported(tree: ast.Module, module: str, *, is_package: bool) -> dict[str, str]:
    """Return what each imported name stands for, wherever in the file it is imported."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0]
                for alias in node.names
            }
        if isinstance(node, ast.ImportFrom):
            source = _absolute(node, module, is_package=is_package)
            found |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in node.names}
    return found


def _absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    package = parts[: len(parts) - node.level + is_package]
    return ".".join([*package, *([node.module] if node.module else [])])


def _defined(tree: ast.Module, module: str) -> dict[str, str]:
    kinds = (ast.ClassDef, ast.FunctionDef)
    return {node.name: f"{module}.{node.name}" for node in tree.body if isinstance(node, kinds)}


def _class(node: ast.ClassDef, names: _Names) -> Class:
    methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    fields = [
        one.target.id
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.value is None
    ]
    is_dataclass = any(names.of(one) == "dataclasses.dataclass" for one in node.decorator_list)
    init, forward, item = methods.get("__init__"), methods.get("forward"), methods.get("__getitem__")
    return Class(
        node.name,
        node.lineno,
        tuple(filter(None, map(names.of, node.bases))),
        _required(init.args, 1) if init else tuple(fields) if is_dataclass else (),
        frozenset(call.name for call in names.calls(node)),
        tuple(names.calls(forward)) if forward else None,
        _item_keys(item) if item else None,
    )


def _required(arguments: ast.arguments, skipped: int = 0) -> tuple[str, ...]:
    """Return the arguments without a default. skipped: `self`, of a method."""
    given = [*arguments.posonlyargs, *arguments.args][skipped:]
    without = given[: len(given) - len(arguments.defaults)] if arguments.defaults else given
    keywords = [
        one for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
    ]
    return tuple(one.arg for one in (*without, *keywords))


def _item_keys(method: ast.FunctionDef) -> tuple[str, ...] | None:
    for node in ast.walk(method):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Dict):
            return tuple(
                key.value for key in node.value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
            )
    return None


def _function(node: ast.FunctionDef, names: _Names) -> Function:
    made = {
        target.id: name
        for one in ast.walk(node)
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call) and (name := names.of(one.value))
        for target in one.targets
        if isinstance(target, ast.Name)
    }
    inner = _Names(names.module, names.dotted, made)
    written = [inner.of(part) for part in _parts_of(_last_return(node))]
    annotated = [names.of(part) for part in _parts_of_annotation(node.returns)]
    return Function(node.name, node.lineno, _required(node.args), tuple(_merged(written, annotated)))


def _last_return(node: ast.FunctionDef) -> ast.expr | None:
    returns = [one for one in ast.walk(node) if isinstance(one, ast.Return) and one.value is not None]
    return max(returns, key=lambda one: one.lineno).value if returns else None


def _parts_of(value: ast.expr | None) -> list[ast.expr]:
    return [] if value is None else list(value.elts) if isinstance(value, ast.Tuple) else [value]


def _parts_of_annotation(node: ast.expr | None) -> list[ast.expr]:
    """Return the members of `tuple[A, B]`, and of `A` that alone."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in ("tuple", "Tuple"):
        return _parts_of(node.slice)
    return _parts_of(node)


def _merged(written: Sequence[str], annotated: Sequence[str]) -> Sequence[str]:
    """Return what is written in the return, and what the annotation says where that says nothing."""
    if len(written) != len(annotated):
        return annotated if len(annotated) > len(written) else written
    return [one or other for one, other in zip(written, annotated, strict=True)]


def _runs_at(tree: ast.Module) -> int | None:
    """Return the first line outside of functions that calls something for what it does, or repeats something."""
    for node in tree.body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.For | ast.While) or (isinstance(node, ast.Expr) and not is_text):
            return node.lineno
    return None
