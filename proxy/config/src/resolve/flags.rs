//! Finds flags and variables, including flags of mitigations, that a model's llama-server does not list in
//! its `--help`. Used by `config check` and `update`; at a start, the process itself reports such flags
//! some seconds later.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::Path;
use std::time::Duration;

use warden_policies::server_flags::{FlagList, is_flag, normal_flag};
use warden_supervisor::ServerCommand;

use super::binary::{query_command, query_program};
use super::resolved::{ResolvedConfig, ResolvedModel};
use crate::problem::{ConfigPlace, ConfigProblem, owned_path, similarity};
use crate::source::layers::LoadedConfig;

/// Least similarity (Jaro-Winkler, 0 to 1) at which another flag is suggested.
const MIN_SIMILARITY: f64 = 0.85;

/// Flags and variables that llama-servers do not know.
#[derive(Debug, Default)]
pub struct UnknownWords {
    /// Unknown flags and values, with which a process does not start.
    pub refused: Vec<ConfigProblem>,
    /// Unknown variables, which the process silently ignores.
    pub ignored: Vec<ConfigProblem>,
}

/// Finds unknown flags and variables of all models. The binaries must have been filled in; each is queried
/// once. A binary that does not answer is skipped, because an earlier check has already reported it.
pub async fn find_unknown_words(loaded: &LoadedConfig, resolved: &ResolvedConfig) -> UnknownWords {
    let mut lists: HashMap<(&[String], &Path), Option<FlagList>> = HashMap::new();
    let mut unknown = UnknownWords::default();
    let models = loaded.models.iter().zip(&resolved.fleet.models).zip(&resolved.models);
    for (((name, written), spec), model) in models {
        if !spec.command.kind.is_llama_server() {
            continue;
        }
        let binary = spec.command.binary.as_path();
        let key = (spec.command.wrapper.as_slice(), binary);
        let list = match lists.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                entry.insert(known_flags(&spec.command, resolved.settings.child.version_timeout).await)
            }
        };
        let check = ModelFlagCheck { name, binary, list: list.as_ref(), model };
        for (key, args) in [("args", &written.args), ("fallback", &written.fallback)] {
            let path = owned_path(&["models", name, key]);
            unknown.refused.extend(check.check_arguments(args, &|index| loaded.item_place(&path, index)));
        }
        let place = |key: &str| loaded.place(&owned_path(&["models", name, "env", key]));
        unknown.ignored.extend(written.env.keys().filter_map(|key| check.check_variable(key, place(key))));
        unknown.refused.extend(check.check_mitigation_flags(&spec.command.args));
    }
    unknown
}

struct ModelFlagCheck<'a> {
    name: &'a str,
    binary: &'a Path,
    list: Option<&'a FlagList>,
    model: &'a ResolvedModel,
}

impl ModelFlagCheck<'_> {
    fn problem(&self, place: ConfigPlace, what: &str) -> ConfigProblem {
        ConfigProblem::new(place, format!("model `{}`: {what}", self.name))
    }

    fn check_arguments(&self, args: &[String], place: &dyn Fn(usize) -> ConfigPlace) -> Vec<ConfigProblem> {
        let mut problems = Vec::new();
        for (index, word) in self.list.map(|list| unknown_flags(args, list)).unwrap_or_default() {
            let next = args.get(index + 1).map(String::as_str);
            let problem =
                self.problem(place(index), &format!("{} has no flag `{word}`", self.binary.display()));
            problems.push(problem.with_hint(self.hint(word, next)));
        }
        // Check values only for builds from the store: a fork may number its builds differently.
        let build = self.model.build.as_ref().filter(|build| build.provenance.is_some());
        if let Some((list, build)) = self.model.mitigations.available().ok().zip(build) {
            for (index, why) in list.refused_values(args, build) {
                let hint = "choose another value, or another build";
                problems.push(self.problem(place(index), &why).with_hint(hint));
            }
        }
        problems
    }

    /// Checks a variable that the operator sets, because llama-server silently ignores unknown ones.
    fn check_variable(&self, key: &str, place: ConfigPlace) -> Option<ConfigProblem> {
        let list = self.list?;
        if list.knows_variable(key) {
            return None;
        }
        let binary = self.binary.display();
        let hint = match nearest(key, list.variables(), strip_variable_prefix) {
            Some(nearest) => format!("the nearest is `{nearest}`"),
            None => format!("`{binary} --help` lists those that it knows"),
        };
        Some(self.problem(place, &format!("{binary} ignores the variable `{key}`")).with_hint(hint))
    }

    /// Checks the flags that mitigations added to `args`, in this binary's spelling.
    fn check_mitigation_flags(&self, args: &[String]) -> Vec<ConfigProblem> {
        let Some(list) = self.list else { return Vec::new() };
        let wrong = self.model.mitigations.given_flags().filter_map(|(place, mitigation, words)| {
            let words = list.translate(words).words;
            let flag = words.first().filter(|flag| !list.knows(flag))?;
            // Skip a flag that was not added, because it is for another backend or was overruled.
            if !args.windows(words.len()).any(|own| own == words) {
                return None;
            }
            let binary = self.binary.display();
            let message = format!(
                "mitigation {mitigation} gives `{}`, and {binary} has no flag `{flag}`",
                words.join(" ")
            );
            let hint = self.hint(flag, words.get(1).map(String::as_str));
            let hint = format!("remove it from `mitigations`; {hint}");
            Some(self.problem(place.clone(), &message).with_hint(hint))
        });
        wrong.collect()
    }

    fn hint(&self, word: &str, next: Option<&str>) -> String {
        let renamed = self.list.and_then(|list| list.renamed_hint(word, next));
        let near = || nearest(&normal_flag(word), self.list?.names(), |word| word);
        renamed
            .or_else(|| Some(format!("the nearest is `{}`", near()?)))
            .unwrap_or_else(|| format!("`{} --help` lists its flags", self.binary.display()))
    }
}

/// Removes common prefixes of variables, with which any two names would look similar.
fn strip_variable_prefix(variable: &str) -> &str {
    variable.trim_start_matches("LLAMA_ARG_").trim_start_matches("NO_")
}

/// Parses all flags of a command's llama-server from its help; `None` if it prints none.
pub async fn known_flags(command: &ServerCommand, timeout: Duration) -> Option<FlagList> {
    let help =
        tokio::time::timeout(timeout, query_program(&query_command(command), "--help")).await.ok()?.ok()?;
    FlagList::parse(&help)
}

/// Returns unknown words that look like flags, but skips a word that may be the value of a known flag.
fn unknown_flags<'a>(args: &'a [String], known: &FlagList) -> Vec<(usize, &'a str)> {
    let words = args.iter().enumerate().filter(|(_, word)| is_flag(word) && !known.knows(word));
    // Accept `-p -x`: a value may begin with one hyphen.
    let value = |at: usize, word: &str| {
        !word.starts_with("--")
            && at.checked_sub(1).and_then(|before| args.get(before)).is_some_and(|before| known.knows(before))
    };
    words.filter(|(at, word)| !value(*at, word)).map(|(at, word)| (at, word.as_str())).collect()
}

/// Returns the known word most similar to `word`, if similar enough. Compares only the `part` of each.
fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>, part: fn(&str) -> &str) -> Option<String> {
    let scored = known.map(|one| (similarity(part(word), part(one)), one));
    scored
        .filter(|(score, _)| *score >= MIN_SIMILARITY)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, one)| one.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Help text of new and old builds.
    const HELP: &str = "----- common params -----\n\n\
        -h,    --help, --usage                  print usage and exit\n\
        -c,    --ctx-size N                     size of the prompt context (default: 4096, 0 = loaded from model)\n\
        -cram, --cache-ram N                    set the maximum cache size in MiB (default: 8192, -1 - no limit)\n\
        -fa,   --flash-attn [on|off|auto]       set Flash Attention use (see also --no-flash.)\n  \
          -np N, --parallel N                 number of slots\n                            (env: LLAMA_ARG_N_PARALLEL)\n";

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn a_flag_that_the_help_does_not_know_is_found_with_the_nearest_one() {
        let filler = (0..20).fold(String::new(), |text, n| text + &format!("--zz{n}zz N  a number\n"));
        let known = FlagList::parse(&format!("{HELP}{filler}")).unwrap();
        for args in ["-c 1 --cache_ram -1", "-np 2 --flash-attn on", "-cram -x", "-- - -1 a-b"] {
            assert_eq!(unknown_flags(&words(args), &known), [], "{args}");
        }
        let args = words("-c 1 --ctx-sice 2 -np 3 -cramm 4 --qqq");
        assert_eq!(unknown_flags(&args, &known), [(2, "--ctx-sice"), (6, "-cramm"), (8, "--qqq")]);
        assert_eq!(nearest("--ctx-sice", known.names(), |word| word).as_deref(), Some("--ctx-size"));
        assert_eq!(nearest("-cramm", known.names(), |word| word).as_deref(), Some("-cram"));
        assert_eq!(nearest("--qqq", known.names(), |word| word), None);
        let variables = || ["LLAMA_ARG_CTX_SIZE", "LLAMA_ARG_NUMA", "LLAMA_ARG_MMPROJ"].into_iter();
        assert_eq!(
            nearest("LLAMA_ARG_CTX_SICE", variables(), strip_variable_prefix).as_deref(),
            Some("LLAMA_ARG_CTX_SIZE")
        );
        assert_eq!(
            nearest("LLAMA_ARG_NO_MMAP", variables(), strip_variable_prefix),
            None,
            "alike by what all begin with"
        );
    }
}
