//! Promise: every link between pages of the project leads to a file and an existing heading.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use warden_rig::{Context as _, Outcome, Trouble};

use crate::layout::root;

/// Files and folders with pages for readers.
const PAGES: [&str; 6] = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "patches", "packaging"];

#[test]
fn links_between_pages_lead_somewhere() -> Outcome {
    let mut pages = Vec::new();
    for place in PAGES {
        collect_pages(&root().join(place), &mut pages)?;
    }
    assert!(pages.len() > 30, "pages were not found: {pages:?}");
    let (mut headings, mut broken) = (BTreeMap::new(), Vec::new());
    for page in &pages {
        let text = std::fs::read_to_string(page).context(page.display())?;
        for (number, line) in prose(&text) {
            for target in targets(line) {
                let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
                let to = if file.is_empty() { page.clone() } else { normal(&page.with_file_name(file)) };
                let lost = if !to.exists() {
                    Some("no such file")
                } else if anchor.is_empty() || to.extension().is_none_or(|end| end != "md") {
                    None
                } else {
                    let known = match headings.entry(to) {
                        std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
                        std::collections::btree_map::Entry::Vacant(place) => {
                            let text = std::fs::read_to_string(place.key())?;
                            place.insert(anchors(&text))
                        }
                    };
                    (!known.contains(anchor)).then_some("no such heading")
                };
                if let Some(why) = lost {
                    broken.push(format!("{}:{number}: {target}: {why}", page.display()));
                }
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
    Ok(())
}

#[test]
fn a_heading_has_the_anchor_that_a_link_to_it_uses() {
    let text = "# A `b`, and c!\n```\n# no heading\n```\n## Twice\n## Twice\n## See [this](x.md)\n";
    assert_eq!(anchors(text), ["a-b-and-c", "see-this", "twice", "twice-1"].map(str::to_owned).into());
    let line = "[a](b.md#c), `[no](code.md)`, [web](https://example.org/), ![p](d.png)";
    assert_eq!(targets(line).collect::<Vec<_>>(), ["b.md#c", "d.png"]);
}

fn collect_pages(place: &Path, pages: &mut Vec<PathBuf>) -> Result<(), Trouble> {
    if place.is_dir() {
        for entry in std::fs::read_dir(place)? {
            collect_pages(&entry?.path(), pages)?;
        }
    } else if place.extension().is_some_and(|end| end == "md") {
        pages.push(place.to_owned());
    }
    Ok(())
}

/// Lines outside code blocks, with their numbers from 1.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    })
}

/// Targets of a line's links, except web addresses and links in code.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    let outside = line.split('`').step_by(2);
    let links = outside.flat_map(|part| part.split("](").skip(1));
    links
        .filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
        .filter(|target| !target.contains(':'))
}

/// Anchors of a page's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for (_, line) in prose(text).filter(|(_, line)| line.starts_with('#')) {
        let heading = line.trim_start_matches('#').trim();
        let mut anchor = String::new();
        for (at, part) in heading.split("](").enumerate() {
            // Only the text of a link counts.
            let part = if at == 0 { part } else { part.split_once(')').map_or("", |(_, rest)| rest) };
            let kept = part.chars().filter(|sign| sign.is_alphanumeric() || [' ', '-', '_'].contains(sign));
            anchor.extend(kept.flat_map(char::to_lowercase).map(|sign| if sign == ' ' { '-' } else { sign }));
        }
        let first = anchor.clone();
        for more in 1.. {
            if all.insert(anchor) {
                break;
            }
            anchor = format!("{first}-{more}");
        }
    }
    all
}

fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            other => normal.push(other),
        }
    }
    normal
}
