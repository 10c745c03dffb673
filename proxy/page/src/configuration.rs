//! The view *Configuration*: the values in force with their sources and without secrets, as printed by
//! `config show`.

use maud::{Markup, html};

use crate::part::{has_words, page_link, search_field};

/// Most sections shown at a time: enough for some fifty models and all sections that belong to no model.
const MAX_SECTIONS: usize = 200;

pub(crate) fn search_form(words: &str) -> Markup {
    html! {
        form method="get" action="/page/configuration" class="filter" role="search" {
            label for="filter" { "Words" }
            (search_field(words, Some("key, value or file")))
            button { "Show" }
        }
    }
}

/// Returns the view. `text`: the output of `config show`, without secrets; `pending`: sections that have
/// changed since the start and need a restart to take effect.
pub(crate) fn configuration_view(text: Option<&str>, pending: &[&str], words: &str) -> Markup {
    let pending: Vec<String> = pending.iter().map(|section| format!("[{section}]")).collect();
    html! {
        h1 { "Configuration" }
        p {
            "The values in force, each with its source. Secrets are left out. "
            "Change them in the file, then apply them with " code { "SIGHUP" } "."
        }
        @if !pending.is_empty() {
            p class="warn" {
                "Changed in the file, and in force after the next start of llama-warden: "
                (pending.join(", ")) "."
            }
        }
        @if let Some(text) = text {
            (section_list(text, words))
        } @else {
            p { "This instance does not keep it." }
        }
    }
}

fn section_list(text: &str, words: &str) -> Markup {
    let mut found = Vec::new();
    for (title, mut lines) in parse_sections(text) {
        if !has_words(words, title) {
            lines.retain(|line| has_words(words, line));
        }
        if !lines.is_empty() {
            found.push((title, lines));
        }
    }
    html! {
        @for (title, lines) in found.iter().take(MAX_SECTIONS) {
            section {
                h2 { code { (title) } }
                (settings_table(title, lines))
            }
        }
        @if found.len() > MAX_SECTIONS {
            p {
                (found.len() - MAX_SECTIONS)
                " sections more are not shown: find those of a model by its name, above."
            }
        }
        @if found.is_empty() {
            p { "No setting has these words." }
            p { (page_link("/page/configuration", "Show all")) }
        }
    }
}

fn settings_table(title: &str, lines: &[&str]) -> Markup {
    html! {
        table role="table" class="settings" {
            caption class="unseen" { "Settings of " (title) }
            thead role="rowgroup" class="unseen" {
                tr role="row" {
                    th role="columnheader" scope="col" { "Setting" }
                    th role="columnheader" scope="col" { "From" }
                }
            }
            tbody role="rowgroup" {
                @for (setting, place) in lines.iter().map(|line| split_source(line)) {
                    tr role="row" {
                        td role="cell" class="says" { code { (setting) } }
                        td role="cell" class="quiet" { (place) }
                    }
                }
            }
        }
    }
}

/// Splits the text into sections with their lines, without the introduction for terminals.
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
            configuration_view(Some(TEXT), &[], words).into_string().matches("class=\"says\"").count()
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
