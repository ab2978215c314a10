"""The page's style sheet: readable on a phone, on paper, and on light or dark ground."""

from __future__ import annotations

from acm_compiler.reporting.figures import DARK, FONT, LIGHT, variables

_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--ink);font:1rem/1.6 FONT}
main{max-width:56rem;margin:0 auto;padding:clamp(1.5rem,5vw,4rem) clamp(1rem,4vw,2rem) 4rem}
h1{
  font-size:clamp(1.6rem,1.2rem + 2.2vw,2.4rem);line-height:1.15;letter-spacing:-.02em;
  margin:.2rem 0 .4rem;overflow-wrap:anywhere;text-wrap:balance;
}
h2{font-size:1.3rem;line-height:1.25;letter-spacing:-.01em;margin:0 0 .4rem}
p{margin:0 0 .9rem;max-width:42rem;text-wrap:pretty;overflow-wrap:break-word}
section{margin-top:clamp(2.5rem,7vw,4rem)}
.kicker{color:var(--muted);font-size:.875rem;margin:0}
.lede{font-size:clamp(1.05rem,1rem + .4vw,1.2rem);line-height:1.5}
.quiet,figcaption{color:var(--muted);font-size:.875rem;line-height:1.5}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.75rem;margin:1.5rem 0 0}
.facts div{
  background:var(--surface);border:1px solid var(--line);border-radius:.75rem;
  padding:.8rem 1rem .9rem;
}
.facts dt{color:var(--muted);font-size:.8125rem;line-height:1.35}
.facts dd{
  margin:.15rem 0 0;font-size:1.55rem;line-height:1.2;font-weight:600;letter-spacing:-.02em;
  font-variant-numeric:tabular-nums;
}
.facts dd small{
  display:block;margin-top:.2rem;font-size:.8125rem;line-height:1.35;font-weight:400;
  letter-spacing:0;color:var(--muted);
}
figure{margin:1.25rem 0}
figcaption{margin-top:.6rem;max-width:42rem}
img{display:block;max-width:100%;height:auto}
.card{
  background:var(--surface);border:1px solid var(--line);border-radius:.75rem;
  padding:clamp(.6rem,2.5vw,1.25rem);
}
.card picture img{width:100%}
.scroll{
  overflow-x:auto;margin:1.25rem 0;background:var(--surface);border:1px solid var(--line);
  border-radius:.75rem;
}
.scroll:focus-visible{outline:2px solid var(--gates);outline-offset:2px}
table{border-collapse:collapse;width:100%;font-size:.875rem;line-height:1.4;font-variant-numeric:tabular-nums}
th,td{padding:.5rem .8rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
thead th{color:var(--muted);font-weight:500;vertical-align:bottom;line-height:1.3}
.wide thead th,.wide td:last-child{white-space:normal}
tbody tr:last-child>*{border-bottom:0}
th:first-child{text-align:left;font-weight:500;position:sticky;left:0;background:var(--surface)}
tbody+tbody tr:first-child>*{border-top:2px solid var(--line)}
.bar{display:flex;gap:1px;width:4.75rem;height:.7rem;border-radius:.2rem;overflow:hidden;margin:.1rem 0 .15rem auto}
.bar i{display:block;height:100%}
.legend{
  display:flex;flex-wrap:wrap;gap:.25rem 1.1rem;align-items:center;color:var(--muted);
  font-size:.875rem;margin:.9rem 0 0;padding:0;list-style:none;
}
.legend i{
  display:inline-block;width:.85rem;height:.85rem;border-radius:.2rem;margin-right:.4rem;
  vertical-align:-.08rem;border:1px solid var(--line);
}
.maps{table-layout:fixed;width:100%;font-size:clamp(.7rem,.6rem + .5vw,.875rem)}
.maps th,.maps td{
  padding:clamp(.1rem,.6vw,.3rem);border:0;text-align:center;white-space:normal;position:static;
  background:none;
}
.maps thead th{padding-bottom:.4rem;font-weight:500}
.maps img{width:100%;aspect-ratio:1;object-fit:contain;border-radius:.3rem}
img.squares{image-rendering:pixelated}
.scale{
  display:flex;align-items:center;gap:.6rem;max-width:24rem;color:var(--muted);font-size:.875rem;
  margin-top:.9rem;font-variant-numeric:tabular-nums;
}
.scale i{flex:1;height:.7rem;border-radius:.2rem}
.load span{
  display:inline-block;padding:0 .25rem;margin:0 0 .15rem;border-radius:.2rem;font-size:.875rem;
}
.words span{padding:0 .08rem;border-radius:.1rem}
.terms{display:grid;grid-template-columns:minmax(0,1fr);gap:0 2rem;margin:1rem 0 0}
.terms dt{font-weight:600;margin-top:.9rem}
.terms dd{margin:.1rem 0 0;color:var(--muted);max-width:42rem;overflow-wrap:anywhere}
@media (min-width:44rem){.terms{grid-template-columns:9rem minmax(0,1fr)}.terms dd{margin-top:.9rem}}
@media (max-width:62rem){th,td{padding:.45rem .5rem}}
@media (min-width:62rem){.wide{margin-inline:calc(50% - min(50vw - 2rem,36rem))}}
h3{font-size:1.05rem;line-height:1.3;margin:2rem 0 .3rem}
footer{margin-top:3.5rem;padding-top:1rem;border-top:1px solid var(--line)}
@media print{body{background:#fff}section,figure,.card{break-inside:avoid}.scroll{overflow:visible}}
"""


def style_sheet() -> str:
    """The whole sheet; dark colours where the reader prefers them."""
    rules = "".join(line.strip() for line in _RULES.replace("FONT", FONT).splitlines())
    light, dark = variables(LIGHT), variables(DARK)
    return f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{rules}"
