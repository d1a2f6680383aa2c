"""A text in Markdown and one in HTML, with a block of every kind."""

MARKDOWN = """# Getting *started*

Run `sonoro serve`, see [the guide](https://example.com/a_(b)?c=1 "a title").
A hyphen-
ated word.

1. Open the **door**
2. Walk in

- [x] one
- two
  - three

> quoted

| Name | Age |
|------|-----|
| Ada  | 36  |

```python
print("not read")
```

[![build](https://img.example.com/x.svg)](https://ci.example.org/x)
![A cat](cat.png)

---

The end.
"""
HTML = """<html><head><title>No</title><style>p { color: red }</style></head><body>
<h1>Title</h1><p>First &amp; last.</p><ol><li>one<li>two</ol>
<table><tr><th>Name</th><th>Age</th></tr><tr><td>Ada</td><td>36</td></tr></table>
<pre>code</pre><img src="x.png" alt="A cat"><script>alert("no")</script><p>Unclosed <b>end"""
