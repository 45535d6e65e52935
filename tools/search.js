// The site's search, before the renderer's script that shows it. The index is a script as well, so that it loads from file:// too.
(() => {
  "use strict";
  const loaded = (pages) => pages.flatMap(([href, title, sections]) => sections.map(
    ([id, section, text, names]) => ({ href: id ? `${href}#${id}` : href, title, section, text, names: names || "" })));
  let loading = null;
  const load = (offset) => loading ??= new Promise((done) => {
    const script = document.createElement("script");
    script.src = offset + "search.js";
    script.onload = () => done(loaded(globalThis.searchIndex));
    script.onerror = () => done([]);
    document.head.append(script);
  });
  // does a word of `text` start with `q`?
  const starts = (text, q) => {
    for (let at = text.indexOf(q); at >= 0; at = text.indexOf(q, at + 1)) if (!at || !/[\p{L}\p{N}_]/u.test(text[at - 1])) return true;
    return false;
  };
  // how well an entry fits, 0 the best; -1: not at all
  const fit = (e, q) => {
    const title = e.title.toLowerCase(), section = e.section.toLowerCase();
    const head = !section, text = e.text.toLowerCase();
    if (head && (title === q || e.href === `${q}.html`)) return 0;
    if (section === q) return 1;
    if (head && starts(title, q)) return 2;
    if (section.split(".").pop() === q) return 3;
    if (head && starts(e.names.toLowerCase(), q)) return 3.5;
    if (starts(section, q)) return 4;
    if (starts(text, q)) return 5;
    const all = `${title} ${section} ${text} ${e.names.toLowerCase()}`;
    return q.split(/\s+/).every((word) => all.includes(word)) ? 6 : -1;
  };
  // puzzles and pages about all stages come after stages and names; what is inside, solutions and what stages share after names and titles
  const level = (e, q) => {
    const found = fit(e, q);
    if (found >= 0 && /^(glossary|papers|primer|map|benchmarks)\.|^(solutions\/)?puzzles[\/.]/.test(e.href)) return Math.max(found, 5.2);
    return found < 0 || !/^(library|solutions|api)\//.test(e.href) ? found : Math.max(found, 4) + 0.5;
  };
  // entries that hold the query, the best first; of equals the index's order: public names and stages before what is inside
  const rank = (index, query, limit) => {
    const q = query.trim().toLowerCase();
    const fits = index.map((e, at) => [level(e, q), at, e]).filter(([found]) => found >= 0);
    return fits.sort((a, b) => a[0] - b[0] || a[1] - b[1]).slice(0, limit).map(([, , e]) => e);
  };
  globalThis.siteSearch = { load, loaded, rank };
})();
