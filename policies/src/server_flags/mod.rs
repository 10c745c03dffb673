//! Flags that a llama-server knows, read from its `--help`, and the other spelling of those that were renamed.
//!
//! Pure: the text of a help in, words out. Builds and forks differ, so nothing is taken for known that the binary itself does not list.

mod renamed;

use std::collections::{BTreeMap, BTreeSet};

pub use self::renamed::{FlagSpelling, RENAMED_FLAGS, RenamedFlag};

/// Flags of a help that is one of a llama-server, which has some two hundred.
const FEWEST_FLAGS: usize = 20;
/// Columns in front of a flag, at most. Its description begins further right, and may begin with a flag, too.
const FLAG_INDENT: usize = 20;
/// How variables begin that stand for flags.
const VARIABLE: &str = "LLAMA_ARG_";
/// Said of flags that are listed only to say what replaced them. Such a flag ends the process.
const REMOVED: &str = "the argument has been removed";

/// All flags that a llama-server lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlagList {
    /// Each with what stands for its value; empty if it takes none.
    known: BTreeMap<String, String>,
    /// Flags that are refused, with what the help says about them.
    removed: BTreeMap<String, String>,
    /// Variables of the environment that stand for a flag; empty if the help names none.
    variables: BTreeSet<String>,
}

impl FlagList {
    /// Reads the text of `--help`; `None` if it lists too few flags for a llama-server.
    pub fn parse(help: &str) -> Option<Self> {
        let mut list = Self::default();
        let mut entry: Option<(Vec<String>, String, String)> = None;
        for line in help.lines() {
            match header(line) {
                Some((flags, value, text)) => {
                    list.take(entry.replace((flags, value, text)));
                }
                None => {
                    if let Some((_, _, text)) = &mut entry {
                        text.push(' ');
                        text.push_str(line.trim());
                    }
                }
            }
        }
        list.take(entry);
        if list.known.len() < FEWEST_FLAGS {
            // A fork with a help of another form: every flag that it mentions counts.
            list.known = mentioned(help).into_iter().map(|flag| (flag, String::new())).collect();
        }
        (list.known.len() >= FEWEST_FLAGS).then_some(list)
    }

    fn take(&mut self, entry: Option<(Vec<String>, String, String)>) {
        let Some((flags, value, text)) = entry else { return };
        let removed = text.find(REMOVED).map(|at| text[at + REMOVED.len()..].trim_start_matches(['.', ' ']));
        if removed.is_none() {
            self.variables.extend(variables_in(&text));
        }
        for flag in flags {
            match removed {
                Some(instead) => drop(self.removed.insert(flag, instead.to_owned())),
                None => drop(self.known.insert(flag, value.clone())),
            }
        }
    }

    /// Whether it takes this flag, in the form that llama-server reads: `_` counts as `-` in long ones.
    pub fn knows(&self, flag: &str) -> bool {
        self.known.contains_key(flag) || self.known.contains_key(&normal_flag(flag))
    }

    /// Whether a variable of the environment means something to it. Only those that stand for flags are listed; of others, and of a
    /// help that names none, nothing is known, and they are believed.
    pub fn knows_variable(&self, name: &str) -> bool {
        let Some(rest) = name.strip_prefix(VARIABLE) else { return true };
        // One that switches a flag off is not listed beside the one that switches it on.
        let positive = rest.strip_prefix("NO_").map(|rest| format!("{VARIABLE}{rest}"));
        self.variables.is_empty()
            || self.variables.contains(name)
            || positive.is_some_and(|name| self.variables.contains(&name))
    }

    /// All variables that stand for flags, in order.
    pub fn variables(&self) -> impl Iterator<Item = &str> {
        self.variables.iter().map(String::as_str)
    }

    /// Whether a flag takes this word for a value. A help that does not list the values is believed.
    pub fn takes(&self, flag: &str, word: &str) -> bool {
        let Some(value) = self.known.get(&normal_flag(flag)) else { return false };
        // `N`, `MODE`, `FNAME` stand for any word; `[on|off|auto]` and `{none,layer,row}` list them.
        let is_list = value.contains('|') || value.starts_with('{');
        let listed = || value.split(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '+')));
        if is_list { listed().any(|one| one == word) } else { !value.is_empty() }
    }

    /// All flags that it takes, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.known.keys().map(String::as_str)
    }

    /// The same words with each renamed flag in the spelling that this binary knows, and the pairs that were exchanged. Unknown words
    /// stay as they are.
    pub fn translate(&self, words: &[String]) -> Translated {
        let mut done = Translated::default();
        let mut at = 0;
        while let Some(word) = words.get(at) {
            let rest = words.get(at + 1).map(String::as_str);
            if let Some((new, taken)) = self.counterpart(word, rest) {
                let old = words[at..at + taken].join(" ");
                done.exchanged.push((old, new.join(" ")));
                done.words.extend(new);
                at += taken;
            } else {
                done.words.push(word.clone());
                at += 1;
            }
        }
        done
    }

    /// The spelling that this binary knows for an unknown flag, and how many words of the command line it replaces.
    fn counterpart(&self, word: &str, next: Option<&str>) -> Option<(Vec<String>, usize)> {
        if !is_flag(word) || self.knows(word) {
            return None;
        }
        let word = normal_flag(word);
        RENAMED_FLAGS.iter().find_map(|renamed| {
            let sides = [(&renamed.old, &renamed.new), (&renamed.new, &renamed.old)];
            sides.into_iter().find_map(|(from, to)| {
                let same =
                    from.names.contains(&word.as_str()) && from.value.is_none_or(|value| next == Some(value));
                let name = to.names.iter().find(|name| self.knows(name)).filter(|_| same)?;
                let value =
                    to.value.iter().filter(|value| self.takes(name, value)).map(|value| (*value).to_owned());
                let new: Vec<String> = std::iter::once((*name).to_owned()).chain(value).collect();
                let whole = new.len() == 1 + usize::from(to.value.is_some());
                whole.then(|| (new, 1 + usize::from(from.value.is_some())))
            })
        })
    }

    /// What is said of an unknown flag that has another name here: how it is written, and since which build. `next`: the word after it.
    pub fn renamed_hint(&self, word: &str, next: Option<&str>) -> Option<String> {
        if let Some(instead) = self.removed.get(&normal_flag(word)).filter(|instead| !instead.is_empty()) {
            return Some(format!("llama.cpp has removed it: {instead}"));
        }
        let (new, _) = self.counterpart(word, next)?;
        let word = normal_flag(word);
        let by_old = RENAMED_FLAGS.iter().find(|one| one.old.names.contains(&word.as_str()));
        let since = match by_old {
            Some(RenamedFlag { gone: Some(gone), .. }) => format!("; `{word}` is gone since about b{gone}"),
            Some(RenamedFlag { since, .. }) => format!(" since b{since}"),
            None => {
                let by_new = RENAMED_FLAGS.iter().find(|one| one.new.names.contains(&word.as_str()))?;
                format!("; `{word}` exists from b{} on", by_new.since)
            }
        };
        Some(format!("write `{}`{since}", new.join(" ")))
    }
}

/// A command line in another spelling.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Translated {
    /// The words.
    pub words: Vec<String>,
    /// What was exchanged: before, after.
    pub exchanged: Vec<(String, String)>,
}

/// A long flag as llama-server reads it: `_` counts as `-`.
pub fn normal_flag(word: &str) -> String {
    if word.starts_with("--") { word.replace('_', "-") } else { word.to_owned() }
}

/// `-c`, `--ctx-size`; not `-1`, `--` or a hyphen in a text.
pub fn is_flag(word: &str) -> bool {
    let name = word.strip_prefix("--").or_else(|| word.strip_prefix('-'));
    name.is_some_and(|name| {
        name.starts_with(|c: char| c.is_ascii_alphabetic())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    })
}

/// The line of a help that begins an entry: its flags, what stands for the value, and the beginning of its description.
fn header(line: &str) -> Option<(Vec<String>, String, String)> {
    let text = line.trim_start();
    if line.len() - text.len() >= FLAG_INDENT || !is_flag(first_word(text)) {
        return None;
    }
    // `-c,    --ctx-size N        size of ...`: blanks after a comma are no gap.
    let gap = text.match_indices("  ").map(|(at, _)| at).find(|at| !text[..*at].trim_end().ends_with(','));
    let (names, about) = text.split_at(gap.unwrap_or(text.len()));
    let (mut flags, mut value) = (Vec::new(), String::new());
    for part in names.split(", ").map(str::trim) {
        let flag = first_word(part);
        if is_flag(flag) {
            flags.push(flag.to_owned());
            part[flag.len()..].trim_start_matches([',', ' ']).clone_into(&mut value);
        }
    }
    Some((flags, value, about.trim().to_owned()))
}

/// The variables that an entry names: `(env: LLAMA_ARG_MLOCK)`.
fn variables_in(text: &str) -> impl Iterator<Item = String> {
    let named = text.split("(env: ").skip(1).filter_map(|rest| rest.split_once(')'));
    named.map(|(name, _)| name.trim().to_owned())
}

fn first_word(text: &str) -> &str {
    text.split(|c: char| c.is_whitespace() || c == ',').next().unwrap_or_default()
}

/// All flags that a text mentions, wherever they stand.
fn mentioned(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| {
        c.is_whitespace() || matches!(c, ',' | '|' | '`' | '(' | ')' | '[' | ']' | '=' | '\'' | '"')
    });
    let words = words.map(|word| word.trim_end_matches(['.', ':', ';']));
    words.filter(|word| is_flag(word)).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests;
