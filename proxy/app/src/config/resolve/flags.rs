//! Flags that a model's llama-server does not have, found by asking it: `--help` lists them all. For `config check`; a start
//! would end with the same words of the process itself, some seconds later.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::time::Duration;

use super::binary::ask;
use crate::config::arguments::normal;
use crate::config::problem::{Problem, alike};
use crate::config::resolve::Resolved;
use crate::config::source::layers::Loaded;

/// A help with fewer flags is not that of a llama-server, which has some two hundred.
const FEWEST: usize = 20;
/// How alike two flags have to be for one to be meant by the other (Jaro-Winkler, 0 to 1).
const ALIKE: f64 = 0.85;

/// The flags in `args` of all models that their llama-servers do not know. The binaries are filled in; each is asked once.
/// One that does not answer says nothing: whether it can be run was tried before.
pub(crate) async fn unknown(loaded: &Loaded, resolved: &Resolved) -> Vec<Problem> {
    let mut helps: HashMap<&Path, Option<BTreeSet<String>>> = HashMap::new();
    let mut problems = Vec::new();
    for ((name, model, _), spec) in loaded.models.iter().zip(&resolved.fleet.models) {
        let binary = spec.command.binary.as_path();
        if model.args.is_empty() && model.fallback.is_empty() {
            continue;
        }
        if !helps.contains_key(binary) {
            helps.insert(binary, known(binary, resolved.child.version_timeout).await);
        }
        let Some(Some(known)) = helps.get(binary) else { continue };
        let lists = [("args", &model.args), ("fallback", &model.fallback)];
        let strangers = lists.iter().flat_map(|(key, args)| {
            strangers(args, known).into_iter().map(move |(index, word)| (*key, index, word))
        });
        for (key, index, word) in strangers {
            let path = ["models".to_owned(), name.clone(), key.to_owned()];
            let message = format!("model `{name}`: {} has no flag `{word}`", binary.display());
            let hint = match nearest(&normal(word), known) {
                Some(near) => format!("the nearest is `{near}`"),
                None => format!("`{} --help` lists its flags", binary.display()),
            };
            problems.push(Problem::new(loaded.item_place(&path, index), message).hint(hint));
        }
    }
    problems
}

/// All flags of a llama-server, by its help; `None` if it tells none.
pub(crate) async fn known(binary: &Path, timeout: Duration) -> Option<BTreeSet<String>> {
    let help = tokio::time::timeout(timeout, ask(binary, "--help")).await.ok()?.ok()?;
    let flags = flags(&help);
    (flags.len() >= FEWEST).then_some(flags)
}

/// All flags that a help speaks of.
fn flags(help: &str) -> BTreeSet<String> {
    let words = help.split(|c: char| {
        c.is_whitespace() || matches!(c, ',' | '|' | '`' | '(' | ')' | '[' | ']' | '=' | '\'' | '"')
    });
    words
        .map(|word| word.trim_end_matches(['.', ':', ';']))
        .filter(|word| is_flag(word))
        .map(str::to_owned)
        .collect()
}

/// `-c`, `--ctx-size`; not `-1`, `--` or a hyphen in a text.
fn is_flag(word: &str) -> bool {
    let name = word.strip_prefix("--").or_else(|| word.strip_prefix('-'));
    name.is_some_and(|name| {
        name.starts_with(|c: char| c.is_ascii_alphabetic())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    })
}

/// Words that look like flags and are none of these. Behind a flag of ours a word may be its value, whatever it looks like.
fn strangers<'a>(args: &'a [String], known: &BTreeSet<String>) -> Vec<(usize, &'a str)> {
    let is_known = |word: &str| known.contains(word) || known.contains(&normal(word));
    let words = args.iter().enumerate().filter(|(_, word)| is_flag(word) && !is_known(word));
    // `-p -x`: a text may begin with one hyphen.
    let value = |at: usize, word: &str| {
        !word.starts_with("--")
            && at.checked_sub(1).and_then(|before| args.get(before)).is_some_and(|before| is_known(before))
    };
    words.filter(|(at, word)| !value(*at, word)).map(|(at, word)| (at, word.as_str())).collect()
}

fn nearest(word: &str, known: &BTreeSet<String>) -> Option<String> {
    let scored = known.iter().map(|one| (alike(word, one), one));
    scored.filter(|(score, _)| *score >= ALIKE).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, one)| one.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As new and old builds print it.
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
    fn all_flags_of_a_help_are_read_and_nothing_else() {
        let read: Vec<String> = flags(HELP).into_iter().collect();
        let wanted =
            "--cache-ram --ctx-size --flash-attn --help --no-flash --parallel --usage -c -cram -fa -h -np";
        assert_eq!(read, words(wanted));
    }

    #[test]
    fn a_flag_that_the_help_does_not_know_is_found_with_the_nearest_one() {
        let known = flags(HELP);
        for args in ["-c 1 --cache_ram -1", "-np 2 --flash-attn on", "-cram -x", "-- - -1 a-b"] {
            assert_eq!(strangers(&words(args), &known), [], "{args}");
        }
        let args = words("-c 1 --ctx-sice 2 -np 3 -cramm 4 --zzz");
        assert_eq!(strangers(&args, &known), [(2, "--ctx-sice"), (6, "-cramm"), (8, "--zzz")]);
        assert_eq!(nearest("--ctx-sice", &known).as_deref(), Some("--ctx-size"));
        assert_eq!(nearest("-cramm", &known).as_deref(), Some("-cram"));
        assert_eq!(nearest("--zzz", &known), None);
    }
}
