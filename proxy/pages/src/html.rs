//! Writes HTML and SVG that are always well formed: text is escaped, and elements are always closed.
//!
//! Input is hostile: names of models, lines of logs and errors are foreign text. Besides the five
//! characters of markup, the escape removes characters that disguise a line: control characters, and
//! characters that change the direction of text.

use std::fmt::{Display, Write};

/// Attributes of an element: fixed names, with values of any origin.
pub type HtmlAttributes<'a> = &'a [(&'static str, &'a dyn Display)];

/// Escapes text for an element or a quoted attribute.
pub fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    push_escaped(&mut safe, text);
    safe
}

fn push_escaped(safe: &mut String, text: &str) {
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            '\n' | '\t' => safe.push(c),
            c if c.is_control() || changes_direction(c) => safe.push(char::REPLACEMENT_CHARACTER),
            c => safe.push(c),
        }
    }
}

/// Returns whether a character changes the text direction (embeddings, overrides, isolates), with which a
/// name can look like another.
const fn changes_direction(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A writer that escapes.
struct EscapingWriter<'a>(&'a mut String);

impl Write for EscapingWriter<'_> {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        push_escaped(self.0, text);
        Ok(())
    }
}

/// Returns the ARIA role of a table's element. Without the role a browser may not recognize a table that is
/// laid out as blocks or as a grid, as on a narrow screen.
fn aria_role(name: &str, attributes: HtmlAttributes<'_>) -> Option<&'static str> {
    let scope =
        |word: &str| attributes.iter().any(|(name, value)| *name == "scope" && value.to_string() == word);
    match name {
        "table" => Some("table"),
        "thead" | "tbody" => Some("rowgroup"),
        "tr" => Some("row"),
        "td" => Some("cell"),
        "th" if scope("row") => Some("rowheader"),
        "th" => Some("columnheader"),
        _ => None,
    }
}

/// A fragment of a page, written from its beginning to its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Html(String);

impl Html {
    /// Creates an empty fragment.
    pub const fn new() -> Self {
        Self(String::new())
    }

    /// Writes text.
    pub fn text(&mut self, text: impl Display) -> &mut Self {
        // Writing to a String cannot fail.
        let _ = write!(EscapingWriter(&mut self.0), "{text}");
        self
    }

    /// Writes trusted markup unchanged, such as another fragment or an entity. Never pass foreign text.
    pub fn raw(&mut self, markup: &str) -> &mut Self {
        self.0.push_str(markup);
        self
    }

    /// Writes an element with text.
    pub fn element(
        &mut self,
        name: &'static str,
        attributes: HtmlAttributes<'_>,
        text: impl Display,
    ) -> &mut Self {
        self.within(name, attributes, |inside| {
            inside.text(text);
        })
    }

    /// Writes an element with the content that `write` writes.
    pub fn within(
        &mut self,
        name: &'static str,
        attributes: HtmlAttributes<'_>,
        write: impl FnOnce(&mut Self),
    ) -> &mut Self {
        self.open(name, attributes);
        self.0.push('>');
        write(self);
        self.0.extend(["</", name, ">"]);
        self
    }

    /// Writes an HTML element without an end tag: `br`, `input`, `link`, `meta`.
    pub fn void(&mut self, name: &'static str, attributes: HtmlAttributes<'_>) -> &mut Self {
        self.open(name, attributes);
        self.0.push('>');
        self
    }

    /// Writes an empty SVG element.
    pub fn shape(&mut self, name: &'static str, attributes: HtmlAttributes<'_>) -> &mut Self {
        self.open(name, attributes);
        self.0.push_str("/>");
        self
    }

    fn open(&mut self, name: &'static str, attributes: HtmlAttributes<'_>) {
        self.0.extend(["<", name]);
        if let Some(role) = aria_role(name, attributes) {
            self.0.extend([" role=\"", role, "\""]);
        }
        for (name, value) in attributes {
            debug_assert!(
                *name != "style" && !name.starts_with("on"),
                "`{name}` is refused by the page's policy for content"
            );
            self.0.extend([" ", name, "=\""]);
            let _ = write!(EscapingWriter(&mut self.0), "{value}");
            self.0.push('"');
        }
    }

    /// Writes a list; writes nothing if there are no lines.
    pub fn list<T: Display>(&mut self, lines: impl IntoIterator<Item = T>) -> &mut Self {
        let mut lines = lines.into_iter().peekable();
        if lines.peek().is_some() {
            self.within("ul", &[], |list| {
                for line in lines {
                    list.element("li", &[], line);
                }
            });
        }
        self
    }

    /// Writes names with a description each, however many lines the description has. Pairs without a
    /// description are left out.
    pub fn terms<N: Display, V: AsRef<str>>(&mut self, pairs: impl IntoIterator<Item = (N, V)>) -> &mut Self {
        self.within("dl", &[("class", &"terms")], |list| {
            for (name, value) in pairs {
                let value = value.as_ref().trim_end();
                if !value.is_empty() {
                    // Put name and description into one box, so that a long description cannot shift the
                    // next name.
                    list.within("div", &[], |pair| {
                        pair.element("dt", &[], name).element("dd", &[], value);
                    });
                }
            }
        })
    }

    /// Returns the fragment as text.
    pub fn into_string(self) -> String {
        self.0
    }

    /// Returns the text written so far.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Display for Html {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_told_can_leave_its_place() {
        for (text, safe) in [
            ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
            ("\" onload=\"x", "&quot; onload=&quot;x"),
            ("it's & more", "it&#39;s &amp; more"),
            ("a\u{0}b\u{1b}[31m\r", "a\u{fffd}b\u{fffd}[31m\u{fffd}"),
            ("gguf\u{202e}fdp.exe", "gguf\u{fffd}fdp.exe"),
            ("two\nlines\tand 漢字 é", "two\nlines\tand 漢字 é"),
        ] {
            assert_eq!(escape(text), safe);
        }
    }

    #[test]
    fn elements_are_closed_and_values_stay_in_their_quotation_marks() {
        let mut html = Html::new();
        html.within("a", &[("href", &"/page?model=\"x\"&a='b'"), ("data-n", &1.5)], |link| {
            link.text("<b>").raw("&nbsp;").shape("path", &[("d", &"M0 0")]);
        });
        assert_eq!(
            html.as_str(),
            "<a href=\"/page?model=&quot;x&quot;&amp;a=&#39;b&#39;\" data-n=\"1.5\">&lt;b&gt;&nbsp;<path d=\"M0 0\"/></a>"
        );
        let mut html = Html::new();
        html.list(Vec::<String>::new()).list(["<one>"]).void("br", &[]);
        assert_eq!(html.into_string(), "<ul><li>&lt;one&gt;</li></ul><br>");
    }

    #[test]
    fn a_table_says_of_each_part_what_it_is() {
        let mut html = Html::new();
        html.within("table", &[("id", &"t")], |table| {
            table.within("thead", &[], |head| {
                head.within("tr", &[], |row| {
                    row.element("th", &[("scope", &"col")], "a").element("td", &[], "");
                });
            });
            table.within("tbody", &[], |body| {
                body.within("tr", &[], |row| {
                    row.element("th", &[("scope", &"row")], "b");
                });
            });
        });
        assert_eq!(
            html.as_str(),
            "<table role=\"table\" id=\"t\"><thead role=\"rowgroup\"><tr role=\"row\"><th role=\"columnheader\" scope=\"col\">a</th>\
             <td role=\"cell\"></td></tr></thead><tbody role=\"rowgroup\"><tr role=\"row\"><th role=\"rowheader\" scope=\"row\">b</th>\
             </tr></tbody></table>"
        );
    }

    #[test]
    fn each_term_has_one_description_whatever_it_says() {
        let mut html = Html::new();
        html.terms([
            ("a", "1"),
            ("llama-server says", "version: 1\nbuilt with\n</dd><dd>"),
            ("none", "  \n"),
            ("b", "2"),
        ]);
        let text = html.into_string();
        assert_eq!((text.matches("<dt>").count(), text.matches("<dd>").count()), (3, 3), "{text}");
        assert_eq!(text.matches("</dt><dd>").count(), 3, "{text}");
        assert!(text.contains("built with\n&lt;/dd&gt;") && !text.contains("none"), "{text}");
    }
}
