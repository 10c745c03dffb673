//! Redacts secrets in output: reports, command output and llama-warden's log.
//!
//! A secret is recognised by the name of its variable, field or flag (`HF_TOKEN`, `"api_key"`, `--api-key`),
//! by its position in an address (user, password, query), or by its form: a known prefix (`hf_`, `sk-`,
//! `ghp_`), or `Bearer` before it. Secrets given to a process are redacted wherever its output repeats them
//! ([`KnownSecrets`]). Other secrets are not recognised.

use serde_json::Value;

/// Replacement text of a secret.
pub const REDACTED: &str = "***";

const SECRET_FLAGS: [&str; 3] = ["--api-key", "-hft", "--hf-token"];

/// Returns true if a text contains a redacted secret, so that it must not be passed to a server.
pub fn is_hidden(text: &str) -> bool {
    text.contains(REDACTED)
}

/// Redacts a variable's value if the variable is a secret, and secrets within the value otherwise.
pub fn redact_variable(name: &str, value: &str) -> (String, String) {
    let shown = if is_secret(name, value) {
        REDACTED.to_owned()
    } else if name.to_ascii_uppercase().contains("PROXY") && !value.contains("://") {
        // Addresses of proxies may omit `http://`.
        redact_user(value)
    } else {
        redact_text(value)
    };
    (name.to_owned(), shown)
}

/// Redacts a server's arguments.
pub fn redact_arguments(args: &[String]) -> Vec<String> {
    let mut hide = false;
    let word = |word: &String| {
        let hidden = std::mem::replace(&mut hide, is_flag(word));
        if hidden { REDACTED.to_owned() } else { redact_text(word) }
    };
    args.iter().map(word).collect()
}

/// Redacts the command line of another tool, such as `env HF_TOKEN=… valgrind`.
pub fn redact_tool(words: &[String]) -> Vec<String> {
    let word = |word: &String| match word.split_once('=') {
        Some((name, value)) => format!("{name}={}", redact_variable(name, value).1),
        None => redact_text(word),
    };
    words.iter().map(word).collect()
}

/// Redacts a JSON value: each text by [`redact_text`], and values under the name of a secret variable or field.
pub fn redact_json(value: Value) -> Value {
    match value {
        Value::String(said) => redact_text(&said).into(),
        Value::Array(items) => redact_list(items),
        Value::Object(fields) => {
            let field = |(name, value): (String, Value)| {
                let shown = match value {
                    Value::String(said)
                        if is_field(&name) || is_variable(&name) && is_secret(&name, &said) =>
                    {
                        if said.is_empty() { said.into() } else { REDACTED.into() }
                    }
                    other => redact_json(other),
                };
                (name, shown)
            };
            fields.into_iter().map(field).collect()
        }
        other => other,
    }
}

/// Redacts a list of words: as a variable and its value if it has this form, else as a command line.
fn redact_list(items: Vec<Value>) -> Value {
    let words: Option<Vec<String>> = items.iter().map(|item| item.as_str().map(str::to_owned)).collect();
    match words.as_deref() {
        Some([name, value]) if is_variable(name) => {
            let (name, value) = redact_variable(name, value);
            vec![name, value].into()
        }
        Some(words) => redact_arguments(words).into(),
        None => items.into_iter().map(redact_json).collect(),
    }
}

/// Redacts secrets that are recognised by their form, and addresses with [`redact_addresses`].
pub fn redact_text(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    // Set if the previous word announces a secret: least length of the secret.
    let mut announced = None;
    while !rest.is_empty() {
        let inside = rest.find(|c| !is_of_token(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(inside);
        let (between, behind) = after.split_at(after.find(is_of_token).unwrap_or(after.len()));
        // A full stop after a word is not part of the word.
        let (word, stop) = word.split_at(word.trim_end_matches('.').len());
        let follows = announced.take().is_some_and(|least| word.len() >= least && is_random(word));
        let hidden = follows || is_token_by_look(word);
        shown.extend([if hidden { REDACTED } else { word }, stop]);
        if let Some((start, value)) = assigned_secret(word, after).filter(|_| stop.is_empty()) {
            shown.extend([&after[..start], REDACTED]);
            rest = &after[start + value.len()..];
            continue;
        }
        if between == " " && ["bearer", "basic"].iter().any(|scheme| word.eq_ignore_ascii_case(scheme)) {
            announced = Some(BEARER_LENGTH_LEAST);
        } else if between == " " && is_flag(word) {
            announced = Some(FLAG_VALUE_LENGTH_LEAST);
        }
        shown.push_str(between);
        rest = behind;
    }
    redact_addresses(&shown)
}

/// Returns the secret that follows its name `word` in the text `after`, and its position there. Recognises
/// `HF_TOKEN=…`, `--api-key=…` and `"api_key": "…"`.
fn assigned_secret<'a>(word: &str, after: &'a str) -> Option<(usize, &'a str)> {
    let bare = |text: &'a str| text.strip_prefix(' ').map_or(text, |text| text.trim_start_matches(' '));
    let inside = |text: &'a str| {
        let quote = text.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        Some((&text[1..], quote))
    };
    // The text from the secret on, its closing quote, and true if flags may be assigned in this form.
    let (tail, quote, named) = if let Some(given) = bare(after).strip_prefix('=') {
        inside(bare(given)).map_or((given, None, true), |(tail, quote)| (tail, Some(quote), true))
    } else {
        let (behind, _) = inside(after)?;
        let (tail, quote) = inside(bare(bare(behind).strip_prefix(':')?))?;
        (tail, Some(quote), false)
    };
    let ends = |c: char| quote.map_or_else(|| ends_address(c), |quote| c == quote);
    let value = tail.split(ends).next().unwrap_or_default();
    let secret = (named && is_flag(word)) || is_field(word) || (is_variable(word) && is_secret(word, value));
    (secret && !value.is_empty()).then(|| (after.len() - tail.len(), value))
}

/// Returns true for a flag whose value is a secret. llama-server accepts `_` for `-` in flag names.
fn is_flag(word: &str) -> bool {
    SECRET_FLAGS.contains(&word)
        || (word.starts_with("--") && SECRET_FLAGS.contains(&word.replace('_', "-").as_str()))
}

fn is_variable(name: &str) -> bool {
    name.bytes().any(|byte| byte.is_ascii_uppercase())
        && name.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
}

fn is_field(name: &str) -> bool {
    const FIELDS: [&str; 9] = [
        "api_key",
        "apikey",
        "hf_token",
        "access_token",
        "auth_token",
        "client_secret",
        "password",
        "passwd",
        "secret_key",
    ];
    FIELDS.iter().any(|field| name.replace('-', "_").eq_ignore_ascii_case(field))
}

/// Least length of a token after `Bearer`: the word after `bearer` in `bearer of news` is shorter.
const BEARER_LENGTH_LEAST: usize = 12;
/// Least length of a secret after a flag: the word after the flag in `use --api-key or a file` is shorter.
const FLAG_VALUE_LENGTH_LEAST: usize = 6;

/// Prefixes of tokens with the least length of the rest: Hugging Face, GitHub, GitLab, `OpenAI` and
/// compatible services, Slack, Amazon.
const TOKEN_PREFIXES: [(&str, usize); 14] = [
    ("hf_", 30),
    ("ghp_", 30),
    ("gho_", 30),
    ("ghu_", 30),
    ("ghs_", 30),
    ("ghr_", 30),
    ("github_pat_", 30),
    ("glpat-", 16),
    ("sk-", 20),
    ("xoxb-", 20),
    ("xoxp-", 20),
    ("AKIA", 16),
    ("ASIA", 16),
    ("nvapi-", 30),
];

fn is_of_token(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '+' | '~')
}

/// Returns true if a text contains both letters and digits, unlike a plain word.
fn is_random(text: &str) -> bool {
    text.bytes().any(|byte| byte.is_ascii_digit()) && text.bytes().any(|byte| byte.is_ascii_alphabetic())
}

fn is_token_by_look(word: &str) -> bool {
    let known = TOKEN_PREFIXES.iter().any(|(beginning, least)| {
        word.strip_prefix(beginning).is_some_and(|rest| {
            // After some prefixes, reject texts with `-` or `.`, which are names of files and models.
            let plain = *beginning == "sk-" || beginning.starts_with("xox") || !rest.contains(['-', '.']);
            rest.len() >= *least && plain && is_random(rest)
        })
    });
    // A signed token (JWT): three parts, the first of which is a JSON object in base64.
    known || (word.starts_with("eyJ") && word.len() > 40 && word.matches('.').count() == 2)
}

/// Redacts user and password in addresses, and everything after `?`, where signed addresses contain keys.
pub fn redact_addresses(text: &str) -> String {
    text.split_inclusive(ends_address).map(redact_address).collect()
}

fn ends_address(c: char) -> bool {
    c.is_whitespace() || c == '"' || c == '\''
}

fn redact_address(text: &str) -> String {
    let Some(start) = text.find("://") else { return text.to_owned() };
    let (all, end) = text.split_at(text.trim_end_matches(ends_address).len());
    let (scheme, rest) = all.split_at(start);
    let (place, query) = rest.split_once('?').map_or((rest, ""), |(place, _)| (place, "?***"));
    let places = place.split("://").map(redact_user).collect::<Vec<_>>().join("://");
    format!("{scheme}{places}{query}{end}")
}

/// Redacts user and password of `user:password@host/path`.
fn redact_user(place: &str) -> String {
    let (host, path) = place.split_at(place.find(['/', '#']).unwrap_or(place.len()));
    host.rsplit_once('@').map_or_else(|| place.to_owned(), |(_, host)| format!("{REDACTED}@{host}{path}"))
}

fn is_secret(name: &str, value: &str) -> bool {
    let name = name.to_ascii_uppercase();
    let word = |word: &str| {
        (word.ends_with("PASS") && word != "BYPASS") || word.ends_with("AUTH") || word == "AUTHORIZATION"
    };
    ["KEY", "SECRET", "PASSW", "PASSPHRASE", "CREDENTIAL"].iter().any(|word| name.contains(word))
        || name.split('_').any(word)
        || name.split("TOKEN").skip(1).any(|rest| is_token(rest, value))
}

/// Decides by the rest of a name after `TOKEN`: `HF_TOKEN` is secret, `TOKENIZERS_PARALLELISM` is not.
fn is_token(rest: &str, value: &str) -> bool {
    let counts = rest.starts_with('S') && value.trim().parse::<f64>().is_ok();
    !counts && !rest.starts_with("IZ")
}

/// Least length of a flag's value to be redacted; shorter values occur within other words.
const SECRET_LENGTH_LEAST: usize = 6;
/// Least length of a variable's value that lacks letters or digits: `enabled` is common in logs.
const PLAIN_SECRET_LENGTH_LEAST: usize = 16;

/// Secrets of one process. `Debug` prints only their number.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct KnownSecrets(Vec<String>);

impl std::fmt::Debug for KnownSecrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KnownSecrets({})", self.0.len())
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

    #[test]
    fn names_of_secrets_are_known_and_numbers_of_tokens_are_none() {
        for name in [
            "LLAMA_API_KEY",
            "HF_TOKEN",
            "hf_token_file",
            "A_SECRET",
            "DB_PASSWORD",
            "MYSQL_PASS",
            "SSHPASS",
            "NPM_AUTH",
            "PROXY_AUTHORIZATION",
            "GOOGLE_APPLICATION_CREDENTIALS",
            "API_TOKENS",
        ] {
            assert_eq!(redact_variable(name, "hush").1, REDACTED, "{name}");
        }
        for (name, value) in [
            ("LLAMA_ARG_IMAGE_MAX_TOKENS", "1024"),
            ("LLAMA_ARG_IMAGE_MIN_TOKENS", "64"),
            ("LLAMA_ARG_MTMD_BATCH_MAX_TOKENS", "2048"),
            ("TOKENIZERS_PARALLELISM", "false"),
            ("GGML_BYPASS", "1"),
            ("GIT_AUTHOR", "a"),
            ("MALLOC_ARENA_MAX", "2"),
        ] {
            assert_eq!(redact_variable(name, value).1, value, "{name}");
        }
    }

    #[test]
    fn an_address_keeps_its_place_and_nothing_else() {
        for (text, shown) in [
            ("https://user:pw@host:8080/a/m.gguf?X-Amz-Signature=1#x", "https://***@host:8080/a/m.gguf?***"),
            ("https://host/m.gguf?to=https://u:p@x&sig=1", "https://host/m.gguf?***"),
            ("http://u:p@a,http://v:q@b/c@d", "http://***@a,http://***@b/c@d"),
            ("{\"url\": \"http://u:p@a/?k=1\", \"n\": 1}", "{\"url\": \"http://***@a/?***\", \"n\": 1}"),
            ("user@host is it?", "user@host is it?"),
            ("https://host/m.gguf", "https://host/m.gguf"),
        ] {
            assert_eq!(redact_addresses(text), shown);
            assert_eq!(is_hidden(shown), text != shown, "{shown}");
        }
        assert_eq!(redact_variable("https_proxy", "u:p@proxy:3128").1, "***@proxy:3128");
        assert_eq!(redact_variable("HTTPS_PROXY", "http://u:p@proxy").1, "http://***@proxy");
    }

    #[test]
    fn tokens_are_known_by_their_look_wherever_they_stand() {
        let hf = "hf_abcdefghijklmnopqrstuvwxyzABCD1234";
        let open = "sk-proj-abcdefgh1234ijkl5678";
        let git = "ghp_abcdefghijklmnopqrstuvwxyz0123456789";
        for (said, shown) in [
            (hf.to_owned(), REDACTED.to_owned()),
            (format!("It was {hf}."), "It was ***.".to_owned()),
            (format!("a=\"{hf}\", b"), "a=\"***\", b".to_owned()),
            (format!("token:{open};x"), "token:***;x".to_owned()),
            (format!("X-Key: {git}\n"), "X-Key: ***\n".to_owned()),
            ("Authorization: Bearer abc123def456ghi".to_owned(), "Authorization: Bearer ***".to_owned()),
            ("authorization: basic dXNlcjpwYXNzd29yZA==".to_owned(), "authorization: basic ***==".to_owned()),
            ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJlLW9mLWl0".to_owned(), REDACTED.to_owned()),
        ] {
            assert_eq!(redact_text(&said), shown);
            assert!(is_hidden(&redact_text(&said)));
            assert_eq!(redact_variable("HARMLESS", &said).1, shown);
        }
        for plain in [
            "hf_models-llama-3-8b-instruct-q4_k_m.gguf",
            "hf_transfer",
            "sk-learn 1.2",
            "task-2024-11-22-run-0001-with-a-long-name",
            "the bearer of news",
            "basic instructions follow",
            "org/Qwen3-30B-A3B-Instruct-2507-GGUF:Q4_K_M",
            "é ü — 漢字",
            "",
        ] {
            assert_eq!(redact_text(plain), plain);
        }
    }

    #[test]
    fn what_a_text_sets_a_secret_to_is_hidden_whatever_it_looks_like() {
        for (said, shown) in [
            ("HF_TOKEN=hush and more", "HF_TOKEN=*** and more"),
            ("MY_TOKEN=\"hush hush\"", "MY_TOKEN=\"***\""),
            ("env: DB_PASSWORD=a$b%c", "env: DB_PASSWORD=***"),
            ("llama-server --api-key=hush -c 1", "llama-server --api-key=*** -c 1"),
            ("llama-server --api-key abc123 -c 1", "llama-server --api-key *** -c 1"),
            ("got {\"api_key\":\"hush\",\"n\":1}", "got {\"api_key\":\"***\",\"n\":1}"),
            ("got {\"password\": \"hush\"}", "got {\"password\": \"***\"}"),
        ] {
            assert_eq!(redact_text(said), shown);
        }
        for plain in [
            "MAX_TOKENS=1024 key=value",
            "use --api-key or a file of keys",
            "the password: it is asked for",
            "A=1 GGML_CUDA_DISABLE_GRAPHS=1",
            "n_tokens = 5, key = 7",
            "HF_TOKEN=",
        ] {
            assert_eq!(redact_text(plain), plain);
        }
    }

    #[test]
    fn values_for_programs_are_shown_without_secrets_and_keep_their_shape() {
        let shown = |text: &str| redact_json(serde_json::from_str(text).unwrap()).to_string();
        assert_eq!(
            shown(
                r#"{"b":1.5,"a":["HF_TOKEN=x",{"MY_TOKEN":"hush","api_key":"hush","tokens":5,"key":"alice"}],"n":null}"#
            ),
            r#"{"b":1.5,"a":["HF_TOKEN=***",{"MY_TOKEN":"***","api_key":"***","tokens":5,"key":"alice"}],"n":null}"#
        );
    }

    #[test]
    fn lists_of_words_are_command_lines_or_a_variable_with_its_value() {
        let shown = |text: &str| redact_json(serde_json::from_str(text).unwrap()).to_string();
        for (said, told) in [
            (r#"["-c","1","--api-key","hush"]"#, r#"["-c","1","--api-key","***"]"#),
            (r#"["--hf-token=hush"]"#, r#"["--hf-token=***"]"#),
            (r#"[["HF_TOKEN","hush"],["A","1"]]"#, r#"[["HF_TOKEN","***"],["A","1"]]"#),
            (r#"["a","b"]"#, r#"["a","b"]"#),
            (r#"["--api-key",{"api_key":"hush"},1]"#, r#"["--api-key",{"api_key":"***"},1]"#),
            ("[]", "[]"),
        ] {
            assert_eq!(shown(said), told);
        }
    }

    #[test]
    fn secrets_of_a_tool_and_of_flags_are_left_out() {
        let words = |all: &[&str]| all.iter().map(|&one| one.to_owned()).collect::<Vec<_>>();
        let all = words(&["env", "HF_TOKEN=hush", "valgrind", "--leak-check=full"]);
        assert_eq!(redact_tool(&all), ["env", "HF_TOKEN=***", "valgrind", "--leak-check=full"]);
        let all = words(&["--api_key", "hush", "-mu", "https://a:b@c/d?e"]);
        assert_eq!(redact_arguments(&all), ["--api_key", REDACTED, "-mu", "https://***@c/d?***"]);
    }

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
        assert_eq!(format!("{known:?}"), "KnownSecrets(4)");
    }
}
