//! Secrets given to a process, redacted in all of its output.

use super::{REDACTED, is_flag, is_random, is_secret};

/// Least length of a flag's value to be redacted; shorter values occur within other words.
const SECRET_LENGTH_LEAST: usize = 6;
/// Least length of a variable's value that lacks letters or digits: short words such as `enabled` are
/// common in logs.
const PLAIN_SECRET_LENGTH_LEAST: usize = 16;

/// Secrets of one process. `Debug` prints only their number.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct KnownSecrets(Vec<String>);

impl std::fmt::Debug for KnownSecrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Known({} secrets)", self.0.len())
    }
}

impl KnownSecrets {
    /// Collects the secrets in a process's arguments and variables.
    pub fn from_command<'a>(
        args: &[String],
        variables: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Self {
        let mut all: Vec<String> = Vec::new();
        for (at, word) in args.iter().enumerate() {
            let value = match word.split_once('=') {
                Some((name, value)) if is_flag(name) => Some(value),
                _ if is_flag(word) => args.get(at + 1).map(String::as_str),
                _ => None,
            };
            // llama-server accepts several keys, separated by commas.
            let keys = value.into_iter().flat_map(|value| value.split(','));
            all.extend(keys.filter(|key| key.len() >= SECRET_LENGTH_LEAST).map(str::to_owned));
        }
        for (name, value) in variables {
            let is_word = value.len() < PLAIN_SECRET_LENGTH_LEAST && !is_random(value);
            let counts = value.len() >= SECRET_LENGTH_LEAST && !is_word && !value.starts_with('/');
            if counts && is_secret(name, value) {
                all.push(value.to_owned());
            }
        }
        // Longest first, because a secret may be the prefix of another.
        all.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        all.dedup();
        Self(all)
    }

    /// Redacts the secrets in a text.
    #[must_use]
    pub fn redact(&self, text: String) -> String {
        self.0.iter().fold(text, |text, secret| {
            if text.contains(secret.as_str()) { text.replace(secret.as_str(), REDACTED) } else { text }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(all: &[&str]) -> Vec<String> {
        all.iter().map(|&one| one.to_owned()).collect()
    }

    #[test]
    fn what_a_process_was_given_is_hidden_wherever_it_repeats_it() {
        let args = words(&["--api_key", "correct horse,battery", "-c", "123456", "--hf-token=stapler"]);
        let variables = [
            ("MY_TOKEN", "tr0ub4dor"),
            ("SECRET_MODE", "enabled"),
            ("SSH_AUTH_SOCK", "/tmp/agent.123"),
            ("HOME", "/home/me0123"),
        ];
        let known = KnownSecrets::from_command(&args, variables);
        let said =
            "correct horse and battery and stapler, tr0ub4dor!, enabled 123456 /tmp/agent.123 /home/me0123";
        assert_eq!(
            known.redact(said.to_owned()),
            "*** and *** and ***, ***!, enabled 123456 /tmp/agent.123 /home/me0123"
        );
        assert_eq!(format!("{known:?}"), "Known(4 secrets)");
    }
}
