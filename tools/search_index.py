"""What the site's search looks through, search.js, and the renderer's script with tools/search.js in the place of its own search.

Pages come in this order: where one starts, the reference, the stages and the rest, puzzles, solutions, modules. Code is left
out but for the names it defines; of the modules' pages remain functions and classes, each with its sentence.
"""
import html
import json
import re
from pathlib import Path
from typing import Any

FIRST = ("index", "reference", "guide", "tour")
LAST = ("puzzles", "solutions", "api")  # folders
OTHER_NAMES = {  # what readers look for, by the page that has it
    "catalogues": "recommender, sampled softmax, SASRec, two-tower", "chunks": "FLCE, Liger", "contrast": "CLIP, SigLIP, InfoNCE, SimCLR",
    "ctc": "ASR, speech recognition, OCR, wav2vec, RNN-T", "divergence": "distillation, KL, JSD, teacher", "kernels": "online softmax",
    "logprobs": "RLHF, RLVR, GRPO, PPO, DPO, policy gradient", "losses": "lm_head, LM head, MTP, vocabulary", "margins": "ArcFace, CosFace, AdaFace, SphereFace, LMCL",
    "partial_fc": "face recognition, insightface, identities", "recompute": "Cut Cross-Entropy, CCE, fused linear kernel", "sharded": "tensor parallel, vocab parallel, Megatron",
    "tiles": "MEVO, activation checkpointing"}
ASSIGN = "globalThis.searchIndex = "
FENCE = re.compile(r"^(`{3,})[^\n]*\n(.*?)^\1", re.MULTILINE | re.DOTALL)
DEFINED = re.compile(r"^\s*(?:def|class)\s+(\w+)", re.MULTILINE)
PATCHES = (  # of the renderer's script: the index is ours, and what holds the query comes before what resembles it
    ('const r = await fetch(offset + "search.json");\n      index = await r.json();', "index = await siteSearch.load(offset);"),
    (', { name: "text", weight: 1 }', ""),
    ("const hits = fuse ?", "const exact = siteSearch.rank(index, q, limit);\n      const hits = exact.length ? exact : fuse ?"))


def place(page: Any) -> tuple:
    "Where a page stands in the index"
    folder, stem = page.src.parts[0], page.src.stem
    return FIRST.index(stem) if stem in FIRST else len(FIRST), LAST.index(folder) + 1 if folder in LAST else 0, str(page.src)


def section_row(section: dict, blocks: list[str], brief: bool) -> list[str]:
    "Anchor, heading, prose and names of a section; `brief`: the first sentence alone"
    text, names = section["text"], []
    for block in blocks:
        flat = " ".join(block.split())
        if flat and flat in text:
            text = text.replace(flat, " ", 1)
            names += DEFINED.findall(block)
    text = html.unescape(re.sub(r"<[^>]+>", " ", " ".join(text.split())))
    text = re.split(r"(?<=\.) |Parameter Type", text)[0] if brief else text
    row = [section["id"], section["title"] if section["id"] else "", text, " ".join(dict.fromkeys(names))]
    return row if row[3] else row[:3]


def page_row(page: Any) -> list:
    "Address, title and sections of a page; a page without text before its first heading has its description there"
    inside = page.src.parts[0] == "api"
    sections = [s for s in page.env.get("search", []) if not (inside and "." in s["title"].removeprefix("class "))]
    rows = [section_row(s, [m[2] for m in FENCE.finditer(page.body)], inside) for s in sections]
    about = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", str(page.front.get("description") or ""))
    if not rows or rows[0][0]:
        rows.insert(0, ["", "", about])
    elif about:
        rows[0][2] = f"{about} {rows[0][2]}".strip()
    if others := OTHER_NAMES.get(page.src.stem.partition("_")[2]):
        rows[0][3:] = [", ".join([*rows[0][3:], others])]
    return [str(page.out), page.title, rows]


def index_script(pages: list) -> str:
    "The index, as a script"
    rows = [page_row(page) for page in sorted(pages, key=place) if page.meta.get("search") is not False]
    return f"{ASSIGN}{json.dumps(rows, ensure_ascii=False, separators=(',', ':'))};\n"


def addresses(script: str) -> list[str]:
    "Where the entries of an index lead"
    pages = json.loads(script.removeprefix(ASSIGN).rstrip(";\n"))
    return [f"{href}#{row[0]}" if row[0] else href for href, _, rows in pages for row in rows]


def with_search(script: str) -> str:
    "The renderer's script, searching as tools/search.js does"
    for old, new in PATCHES:
        if script.count(old) != 1:
            raise ValueError(f"smalldocs.js: expected once {old!r}, got it {script.count(old)} times")
        script = script.replace(old, new)
    return Path(__file__).with_name("search.js").read_text(encoding="utf-8") + script
