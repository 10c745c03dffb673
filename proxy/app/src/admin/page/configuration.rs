//! The view *Configuration*: the values in force with their sources and without secrets, as printed by
//! `config show`.

use warden_pages::Html;

use super::part::write_link;
use super::search::has_words;

/// Most sections shown at a time: enough for some fifty models and all sections that belong to no model.
const MAX_SECTIONS: usize = 200;

/// Returns the search form.
pub(crate) fn search_form(words: &str) -> Html {
    let mut html = Html::new();
    html.within(
        "form",
        &[("method", &"get"), ("action", &"/page/configuration"), ("class", &"filter"), ("role", &"search")],
        |form| {
            form.element("label", &[("for", &"filter")], "Words");
            form.void(
                "input",
                &[
                    ("id", &"filter"),
                    ("name", &"q"),
                    ("type", &"search"),
                    ("value", &words),
                    ("autocomplete", &"off"),
                    ("placeholder", &"key, value or file"),
                ],
            );
            form.element("button", &[], "Show");
        },
    );
    html
}

/// Returns the view. `text`: the output of `config show`, without secrets; `pending`: sections that have
/// changed since the start and need a restart to take effect.
pub(crate) fn configuration_view(text: Option<&str>, pending: &[&str], words: &str) -> Html {
    let mut html = Html::new();
    html.element("h1", &[], "Configuration");
    html.within("p", &[], |p| {
        p.text("The values in force, each with its source. Secrets are left out. ");
        p.text("Change them in the file, then apply them with ").element("code", &[], "SIGHUP").text(".");
    });
    if !pending.is_empty() {
        let all: Vec<String> = pending.iter().map(|section| format!("[{section}]")).collect();
        html.element(
            "p",
            &[("class", &"warn")],
            format_args!(
                "Changed in the file, and in force after the next start of llama-warden: {}.",
                all.join(", ")
            ),
        );
    }
    let Some(text) = text else {
        html.element("p", &[], "This instance does not keep it.");
        return html;
    };
    let mut found = 0;
    for (title, lines) in parse_sections(text) {
        let whole = has_words(words, title);
        let lines: Vec<&str> = lines.into_iter().filter(|line| whole || has_words(words, line)).collect();
        if lines.is_empty() {
            continue;
        }
        found += 1;
        if found > MAX_SECTIONS {
            continue;
        }
        html.within("section", &[], |section| {
            section.within("h2", &[], |h2| {
                h2.element("code", &[], title);
            });
            section.within("table", &[("class", &"settings")], |table| {
                table.element("caption", &[("class", &"unseen")], format_args!("Settings of {title}"));
                table.within("thead", &[("class", &"unseen")], |head| {
                    head.within("tr", &[], |row| {
                        row.element("th", &[("scope", &"col")], "Setting");
                        row.element("th", &[("scope", &"col")], "From");
                    });
                });
                table.within("tbody", &[], |body| {
                    for line in lines {
                        let (setting, place) = split_source(line);
                        body.within("tr", &[], |row| {
                            row.within("td", &[("class", &"says")], |td| {
                                td.element("code", &[], setting);
                            });
                            row.element("td", &[("class", &"quiet")], place);
                        });
                    }
                });
            });
        });
    }
    if found > MAX_SECTIONS {
        let more = found - MAX_SECTIONS;
        html.element(
            "p",
            &[],
            format_args!("{more} sections more are not shown: find those of a model by its name, above."),
        );
    }
    if found == 0 {
        html.element("p", &[], "No setting has these words.").within("p", &[], |p| {
            write_link(p, "/page/configuration", "Show all");
        });
    }
    html
}

/// Splits the text into sections with their lines. Text before the first section is meant for terminals and
/// left out.
fn parse_sections(text: &str) -> Vec<(&str, Vec<&str>)> {
    let mut all: Vec<(&str, Vec<&str>)> = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        match all.last_mut() {
            _ if line.starts_with('[') && line.ends_with(']') => all.push((line, Vec::new())),
            Some((_, lines)) => lines.push(line),
            None => {}
        }
    }
    all
}

/// Splits a setting from its source, which follows the last occurrence of two spaces and a `#`. No value
/// contains these unquoted at its end.
fn split_source(line: &str) -> (&str, &str) {
    line.rsplit_once("  # ").unwrap_or((line, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Secrets are hidden\n\n[server]\nport = 1  # w.toml:2\nhost = \"a  # b\"  # default\n\n[models.\"<b>\"]\nargs = [\"--x\", \"***\"]  # w.toml:9\n";

    #[test]
    fn each_setting_stands_beside_its_place_and_words_find_both() {
        let rows = |words: &str| {
            configuration_view(Some(TEXT), &[], words).as_str().matches("class=\"says\"").count()
        };
        assert_eq!(
            (rows(""), rows("w.toml"), rows("port"), rows("[server]"), rows("nothing")),
            (3, 2, 1, 2, 0)
        );
        let whole = configuration_view(Some(TEXT), &["server"], "").into_string();
        assert!(whole.contains("host = &quot;a  # b&quot;</code>") && whole.contains(">default<"), "{whole}");
        assert!(!whole.contains("<b>") && whole.contains("[server]."), "{whole}");
    }
}
