//! Limits for names, words and sizes in the program's code. A limit may only fall.

use std::collections::BTreeMap;

use regex::Regex;
use warden_rig::{Outcome, Trouble};

use crate::layout::{root, rust_files};

/// Words of a private voice: phrases that hide the actor or point at things without naming them.
const PRIVATE_VOICE: &str = r"(?i)\b(told|tells?|telling|whoever|whatever|somebody|nobody|anybody|beside|anew|goes on|go on|went on|that there is none|is asked|to be had|makes room|those that|it is that|says so|in its place|takes? along|comes? along|goes? along|stands? for)\b";
/// Most columns of a line.
const WIDEST: usize = 120;
/// Most lines of a function.
const LONGEST_FUNCTION: usize = 80;
/// Most fields of a struct, except in the configuration, whose sections have a field for each key.
const MOST_FIELDS: usize = 12;

/// A count over the program, and its limit.
struct StyleCount {
    name: &'static str,
    bound: usize,
    /// Counted places.
    places: Vec<String>,
}

impl StyleCount {
    const fn new(name: &'static str, bound: usize) -> Self {
        Self { name, bound, places: Vec::new() }
    }

    /// Returns an error if the count is above its limit, or so far below that the limit should fall.
    fn complaint(&self) -> Option<String> {
        let Self { name, bound, places } = self;
        let (found, slack) = (places.len(), (bound / 20).max(2));
        if found > *bound {
            let shown: Vec<&str> = places.iter().rev().take(40).map(String::as_str).collect();
            return Some(format!(
                "{name}: {found}, more than the bound of {bound}; among them:\n{}",
                shown.join("\n")
            ));
        }
        (found + slack < *bound)
            .then(|| format!("{name}: {found}; lower the bound of {bound} in tests/it/style.rs"))
    }
}

/// Lines of the program's files, without test files.
fn program() -> Result<Vec<(String, Vec<String>)>, Trouble> {
    let is_test = Regex::new(r"(^|/)(tests?|benches|examples|fuzz)(/|\.rs$)|_tests?\.rs$")?;
    let mut all = Vec::new();
    for folder in ["policies", "patches", "builder", "proxy", "lab"] {
        for file in rust_files(&root().join(folder))? {
            let name = file.strip_prefix(root())?.display().to_string();
            if is_test.is_match(&name) {
                continue;
            }
            let text = std::fs::read_to_string(&file)?;
            let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
            let tests = lines.windows(2).position(|pair| {
                pair[0].starts_with("#[cfg(test)]") && pair[1].contains("mod ") && pair[1].ends_with('{')
            });
            lines.truncate(tests.unwrap_or(lines.len()));
            all.push((name, lines));
        }
    }
    all.sort();
    Ok(all)
}

/// Returns the closing line of a block: the first with a brace in the same column.
fn end_of(lines: &[String], start: usize) -> Option<usize> {
    let indent = lines[start].len() - lines[start].trim_start().len();
    let close = format!("{}}}", " ".repeat(indent));
    lines.iter().enumerate().skip(start).find(|(_, line)| line.starts_with(&close)).map(|(at, _)| at)
}

/// True if the function that begins at `start` has a body: a trait's declaration ends with a semicolon.
fn has_body(lines: &[String], start: usize) -> bool {
    let is_end = |line: &&String| line.ends_with(['{', '}', ';']);
    lines[start..].iter().find(is_end).is_some_and(|line| !line.ends_with(';'))
}

#[test]
fn names_words_and_sizes_only_improve() -> Outcome {
    let type_name = Regex::new(
        r"^\s*(?:pub(?:\([^)]*\))?\s+)?(?:unsafe\s+)?(struct|enum|trait|type|union)\s+([A-Z]\w*)",
    )?;
    let one_word = Regex::new(r"^[A-Z][a-z0-9]*$")?;
    let function = Regex::new(
        r#"^\s*(?:pub(?:\([^)]*\))?\s+)?(?:const\s+)?(?:async\s+)?(?:unsafe\s+)?(?:extern\s+"C"\s+)?fn\s+\w+"#,
    )?;
    let field = Regex::new(r"^\s*(?:pub(?:\([^)]*\))?\s+)?[a-z_]\w*: ")?;
    let comment = Regex::new(r"^\s*//[/!]?\s?(.*)")?;
    let voice = Regex::new(PRIVATE_VOICE)?;

    let mut one_worded = StyleCount::new("types with a name of one word", BOUNDS.one_word);
    let mut shared = StyleCount::new("types that share their name with another", BOUNDS.shared);
    let mut private = StyleCount::new("comment lines in a private voice", BOUNDS.private_voice);
    let mut wide = StyleCount::new("lines wider than 120 columns", BOUNDS.wide);
    let mut long = StyleCount::new("functions of more than 80 lines", BOUNDS.long_functions);
    let mut large = StyleCount::new("structs of more than 12 fields", BOUNDS.large_structs);
    let mut names: BTreeMap<String, Vec<String>> = BTreeMap::new();

    for (file, lines) in program()? {
        for (at, line) in lines.iter().enumerate() {
            let place = || format!("{file}:{}: {}", at + 1, line.trim());
            if line.chars().count() > WIDEST {
                wide.places.push(place());
            }
            if comment.captures(line).is_some_and(|text| voice.is_match(&text[1])) {
                private.places.push(place());
            }
            if function.is_match(line)
                && has_body(&lines, at)
                && end_of(&lines, at).is_some_and(|end| end - at + 1 > LONGEST_FUNCTION)
            {
                long.places.push(place());
            }
            let Some(found) = type_name.captures(line) else { continue };
            if one_word.is_match(&found[2]) {
                one_worded.places.push(place());
            }
            names.entry(found[2].to_owned()).or_default().push(place());
            let has_fields = &found[1] == "struct" && line.trim_end().ends_with('{');
            let is_key_section =
                file.starts_with("policies/src/defaults/") || file.contains("config/src/settings");
            if has_fields && !is_key_section {
                let end = end_of(&lines, at).unwrap_or(at);
                if lines[at..end].iter().filter(|line| field.is_match(line)).count() > MOST_FIELDS {
                    large.places.push(place());
                }
            }
        }
    }
    shared.places = names.into_values().filter(|places| places.len() > 1).flatten().collect();
    let counts = [one_worded, shared, private, wide, long, large];
    for count in &counts {
        println!("{}: {} (bound {})", count.name, count.places.len(), count.bound);
    }
    let complaints: Vec<String> = counts.iter().filter_map(StyleCount::complaint).collect();
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    Ok(())
}

/// Best counts so far.
struct StyleBounds {
    one_word: usize,
    shared: usize,
    private_voice: usize,
    wide: usize,
    long_functions: usize,
    large_structs: usize,
}

const BOUNDS: StyleBounds = StyleBounds {
    one_word: 56,
    shared: 37,
    private_voice: 53,
    wide: 0,
    long_functions: 0,
    large_structs: 27,
};
