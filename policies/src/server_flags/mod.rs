//! Parses the flags of a llama-server from its `--help`, and translates renamed flags.
//!
//! Works on the help text only. Builds and forks differ, so only flags that the binary lists count as known.

use std::collections::{BTreeMap, BTreeSet};

/// Least number of flags that the help of a llama-server lists; usually there are some two hundred.
const FEWEST_FLAGS: usize = 20;
/// Largest indentation of a flag in the help; descriptions, which may begin with a flag, have more.
const FLAG_INDENT: usize = 20;
const VARIABLE_PREFIX: &str = "LLAMA_ARG_";
/// Marks flags that the help lists only to name their replacement. With such a flag the server exits.
const REMOVED_TEXT: &str = "the argument has been removed";

/// All flags listed by a llama-server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlagList {
    /// All flags, with the placeholder of the value; empty if the flag takes no value.
    known: BTreeMap<String, String>,
    /// Removed flags, with the help's text about each.
    removed: BTreeMap<String, String>,
    /// Environment variables that set a flag; empty if the help names none.
    variables: BTreeSet<String>,
}

impl FlagList {
    /// Parses the text of `--help`; `None` if it lists too few flags for a llama-server.
    pub fn parse(help: &str) -> Option<Self> {
        let mut list = Self::default();
        let mut entry: Option<(Vec<String>, String, String)> = None;
        for line in help.lines() {
            match entry_header(line) {
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
            // A fork may format its help in another way: then count every flag mentioned in the text.
            list.known = mentioned_flags(help).into_iter().map(|flag| (flag, String::new())).collect();
        }
        (list.known.len() >= FEWEST_FLAGS).then_some(list)
    }

    fn take(&mut self, entry: Option<(Vec<String>, String, String)>) {
        let Some((flags, value, text)) = entry else { return };
        let removed =
            text.find(REMOVED_TEXT).map(|at| text[at + REMOVED_TEXT.len()..].trim_start_matches(['.', ' ']));
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

    /// Returns true if the binary accepts this flag; `_` counts as `-` in long flags.
    pub fn knows(&self, flag: &str) -> bool {
        self.known.contains_key(flag) || self.known.contains_key(&normal_flag(flag))
    }

    /// Returns true if a variable may have an effect. Variables that set no flag count as known.
    pub fn knows_variable(&self, name: &str) -> bool {
        let Some(rest) = name.strip_prefix(VARIABLE_PREFIX) else { return true };
        // The help lists only positive variables, without the negating ones (`LLAMA_ARG_NO_…`).
        let positive = rest.strip_prefix("NO_").map(|rest| format!("{VARIABLE_PREFIX}{rest}"));
        self.variables.is_empty()
            || self.variables.contains(name)
            || positive.is_some_and(|name| self.variables.contains(&name))
    }

    /// Returns all variables that set flags, in order.
    pub fn variables(&self) -> impl Iterator<Item = &str> {
        self.variables.iter().map(String::as_str)
    }

    /// Returns true if a flag accepts this value, or if the help does not list the flag's values.
    pub fn takes(&self, flag: &str, word: &str) -> bool {
        let Some(value) = self.known.get(&normal_flag(flag)) else { return false };
        // `N`, `MODE`, `FNAME` are placeholders; `[on|off|auto]` and `{none,layer,row}` list values.
        let is_list = value.contains('|') || value.starts_with('{');
        let listed = || value.split(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '+')));
        if is_list { listed().any(|one| one == word) } else { !value.is_empty() }
    }

    /// Returns all accepted flags, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.known.keys().map(String::as_str)
    }

    /// Translates renamed flags to the spelling of this binary; also returns the exchanged words.
    pub fn translate(&self, words: &[String]) -> TranslatedCommand {
        let mut done = TranslatedCommand::default();
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

    /// Returns this binary's spelling of an unknown flag, and the number of words that it replaces.
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

    /// Returns the other name of a renamed flag and its first build. `next`: word after the flag.
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

/// A command line translated for another build.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TranslatedCommand {
    /// Words of the command line.
    pub words: Vec<String>,
    /// Exchanged words: text before, text after.
    pub exchanged: Vec<(String, String)>,
}

/// Normalises a long flag as llama-server does: `_` counts as `-`.
pub fn normal_flag(word: &str) -> String {
    if word.starts_with("--") { word.replace('_', "-") } else { word.to_owned() }
}

/// Returns the word after the last of these flags, because llama-server uses the last one.
pub fn last_value<'a>(args: &'a [String], flags: &[&str]) -> Option<&'a str> {
    let at = args.iter().rposition(|word| flags.contains(&normal_flag(word).as_str()))?;
    args.get(at + 1).map(String::as_str)
}

/// Returns true for words such as `-c` and `--ctx-size`, but not for `-1`, `--` or a hyphen in a text.
pub fn is_flag(word: &str) -> bool {
    let name = word.strip_prefix("--").or_else(|| word.strip_prefix('-'));
    name.is_some_and(|name| {
        name.starts_with(|c: char| c.is_ascii_alphabetic())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    })
}

/// Parses the first line of a help entry: flags, the value's placeholder, start of the description.
fn entry_header(line: &str) -> Option<(Vec<String>, String, String)> {
    let text = line.trim_start();
    if line.len() - text.len() >= FLAG_INDENT || !is_flag(first_word(text)) {
        return None;
    }
    // The flags end at two blanks, but not after a comma: `-c,    --ctx-size N        size of ...`.
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

/// Returns the variables named by a help entry, in the form `(env: LLAMA_ARG_MLOCK)`.
fn variables_in(text: &str) -> impl Iterator<Item = String> {
    let named = text.split("(env: ").skip(1).filter_map(|rest| rest.split_once(')'));
    named.map(|(name, _)| name.trim().to_owned())
}

fn first_word(text: &str) -> &str {
    text.split(|c: char| c.is_whitespace() || c == ',').next().unwrap_or_default()
}

fn mentioned_flags(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| {
        c.is_whitespace() || matches!(c, ',' | '|' | '`' | '(' | ')' | '[' | ']' | '=' | '\'' | '"')
    });
    let words = words.map(|word| word.trim_end_matches(['.', ':', ';']));
    words.filter(|word| is_flag(word)).map(str::to_owned).collect()
}

/// A name of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlagSpelling {
    /// Spellings of the name; the first spelling known to the binary is used.
    pub names: &'static [&'static str],
    /// Word after the flag that belongs to its name; `None` if a value or nothing follows.
    pub value: Option<&'static str>,
}

/// A flag with two names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RenamedFlag {
    /// Name in older builds.
    pub old: FlagSpelling,
    /// Name in newer builds.
    pub new: FlagSpelling,
    /// Number of the first build with the new name.
    pub since: u32,
    /// Number of a build that lacks the old name; `None` if it is still an alias.
    pub gone: Option<u32>,
}

const fn flag_spelling(names: &'static [&'static str]) -> FlagSpelling {
    FlagSpelling { names, value: None }
}

/// Describes a flag that was replaced by `--load-mode VALUE`.
const fn load_mode_flag(old: &'static [&'static str], value: &'static str) -> RenamedFlag {
    let new = FlagSpelling { names: &["--load-mode", "-lm"], value: Some(value) };
    RenamedFlag { old: flag_spelling(old), new, since: 10_105, gone: Some(10_884) }
}

/// Describes a flag of the draft model whose old name remains an alias.
const fn draft_flag(old: &'static [&'static str], new: &'static [&'static str]) -> RenamedFlag {
    RenamedFlag { old: flag_spelling(old), new: flag_spelling(new), since: 8955, gone: None }
}

/// All renamed flags, with the build of each change in llama.cpp; old names may still be aliases.
pub const RENAMED_FLAGS: &[RenamedFlag] = &[
    load_mode_flag(&["--no-mmap"], "none"),
    load_mode_flag(&["--mmap"], "mmap"),
    load_mode_flag(&["--mlock"], "mlock"),
    load_mode_flag(&["-dio", "--direct-io"], "dio"),
    load_mode_flag(&["-ndio", "--no-direct-io"], "none"),
    RenamedFlag {
        gone: Some(8955),
        ..draft_flag(&["--draft-max", "--draft", "--draft-n"], &["--spec-draft-n-max"])
    },
    RenamedFlag {
        gone: Some(8955),
        ..draft_flag(&["--draft-min", "--draft-n-min"], &["--spec-draft-n-min"])
    },
    draft_flag(&["--model-draft", "-md"], &["--spec-draft-model"]),
    draft_flag(&["--hf-repo-draft", "-hfd", "-hfrd"], &["--spec-draft-hf"]),
    draft_flag(&["--gpu-layers-draft", "--n-gpu-layers-draft", "-ngld"], &["--spec-draft-ngl"]),
    draft_flag(&["--device-draft", "-devd"], &["--spec-draft-device"]),
    draft_flag(&["--threads-draft", "-td"], &["--spec-draft-threads"]),
    draft_flag(&["--threads-batch-draft", "-tbd"], &["--spec-draft-threads-batch"]),
    draft_flag(&["--draft-p-min"], &["--spec-draft-p-min"]),
    draft_flag(&["--draft-p-split"], &["--spec-draft-p-split"]),
    draft_flag(&["--cache-type-k-draft", "-ctkd"], &["--spec-draft-type-k"]),
    draft_flag(&["--cache-type-v-draft", "-ctvd"], &["--spec-draft-type-v"]),
    draft_flag(&["--override-tensor-draft", "-otd"], &["--spec-draft-override-tensor"]),
    draft_flag(&["--cpu-moe-draft", "-cmoed"], &["--spec-draft-cpu-moe"]),
    draft_flag(&["--n-cpu-moe-draft", "-ncmoed"], &["--spec-draft-n-cpu-moe", "--spec-draft-ncmoe"]),
    RenamedFlag {
        old: flag_spelling(&["--checkpoint-every-n-tokens", "-cpent"]),
        new: flag_spelling(&["--checkpoint-min-step", "-cms"]),
        since: 9310,
        gone: Some(9310),
    },
    RenamedFlag { old: flag_spelling(&["--webui"]), new: flag_spelling(&["--ui"]), since: 9174, gone: None },
    RenamedFlag {
        old: flag_spelling(&["--no-webui"]),
        new: flag_spelling(&["--no-ui"]),
        since: 9174,
        gone: None,
    },
];

#[cfg(test)]
mod tests;
