"""How a page looks: one column, light and dark, readable on paper."""

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --pale: #5a5a5a; --paper: #ffffff;
  --card: #ffffff; --line: #d9d9d9; --idle: #eeeeee; --bad: #b3261e; --best: #eef6ff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --pale: #a8a8a8; --paper: #14161a;
  --card: #1b1e24; --line: #3a3f48; --idle: #2a2e36; --bad: #ff8a80;
  --best: #1d2a3a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 1120px; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { margin: .4rem 0; max-width: 75ch; } .pale { color: var(--pale); }
.numbers { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0; padding: 0; }
.numbers div { border: 1px solid var(--line); border-radius: 8px; padding: .6rem .9rem;
  background: var(--card); min-width: 8rem; }
.numbers dt { color: var(--pale); font-size: .8rem; } .numbers dd { margin: 0; font-size: 1.15rem;
  font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums;
  width: 100%; }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { font-weight: 600; color: var(--pale); } .words { text-align: left; }
td.long { white-space: normal; min-width: 11rem; text-align: left; }
tr.best td { background: var(--best); } .bad { color: var(--bad); }
code { font: .9em ui-monospace, Menlo, Consolas, monospace; }
details { border: 1px solid var(--line); border-radius: 8px; padding: .5rem 1rem; margin: .75rem 0;
  background: var(--card); }
summary { cursor: pointer; font-weight: 600; padding: .25rem 0; }
pre { overflow-x: auto; font: 12px/1.4 ui-monospace, Menlo, Consolas, monospace; }
li { margin: .25rem 0; }
@media print { body { max-width: none; } details { break-inside: avoid; } }
"""
