//! What is shown to others without its secrets: reports, `config show`, `status`, `logs`, `events`.
//!
//! A secret is known by the name of its variable or flag (`HF_TOKEN`, `--api-key`), by its place in an address (user,
//! password, what follows a `?`), or by its own look: the tokens of the usual services begin with letters that say so
//! (`hf_`, `sk-`, `ghp_`), and what follows `Bearer` is one. Nothing is promised beyond that.

/// What stands in the place of a secret.
pub const HIDDEN: &str = "***";

/// Flags whose value is a secret.
const FLAGS: [&str; 3] = ["--api-key", "-hft", "--hf-token"];

/// Whether something was taken out of it, so that it cannot be given to a server any more.
pub fn is_hidden(text: &str) -> bool {
    text.contains(HIDDEN)
}

/// A variable without what it says, if that is a secret.
pub fn variable(name: &str, value: &str) -> (String, String) {
    let shown = if is_secret(name, value) {
        HIDDEN.to_owned()
    } else if name.to_ascii_uppercase().contains("PROXY") && !value.contains("://") {
        // A proxy is also understood without `http://`.
        without_user(value)
    } else {
        text(value)
    };
    (name.to_owned(), shown)
}

/// Arguments of a server without secrets.
pub fn arguments(args: &[String]) -> Vec<String> {
    let mut hide = false;
    let word = |word: &String| {
        // llama-server takes `_` for `-` in the names of its flags.
        let name = if word.starts_with("--") { word.replace('_', "-") } else { word.clone() };
        let hidden = std::mem::replace(&mut hide, FLAGS.contains(&name.as_str()));
        if hidden { HIDDEN.to_owned() } else { text(word) }
    };
    args.iter().map(word).collect()
}

/// Words of another tool without secrets: `env HF_TOKEN=… valgrind`.
pub fn tool(words: &[String]) -> Vec<String> {
    let word = |word: &String| match word.split_once('=') {
        Some((name, value)) => format!("{name}={}", variable(name, value).1),
        None => text(word),
    };
    words.iter().map(word).collect()
}

/// A text without what looks like a secret, and with addresses as [`addresses`] leaves them.
pub fn text(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    // Whether the word before announced that this one is a secret.
    let mut announced = false;
    while !rest.is_empty() {
        let inside = rest.find(|c| !is_of_token(c)).unwrap_or(rest.len());
        let (word, behind) = rest.split_at(inside);
        let gap = behind.find(is_of_token).unwrap_or(behind.len());
        let (between, behind) = behind.split_at(gap);
        // The full stop of a sentence is no part of it.
        let (word, stop) = word.split_at(word.trim_end_matches('.').len());
        let hidden = is_token_by_look(word) || (announced && word.len() >= ANNOUNCED && is_random(word));
        shown.extend([if hidden { HIDDEN } else { word }, stop]);
        shown.push_str(between);
        announced =
            ["bearer", "basic"].iter().any(|scheme| word.eq_ignore_ascii_case(scheme)) && between == " ";
        rest = behind;
    }
    addresses(&shown)
}

/// Letters of what follows `Bearer`, at least: `bearer of news` is none.
const ANNOUNCED: usize = 12;

/// How tokens of the usual services begin, and how many letters follow at least: Hugging Face, GitHub, GitLab, `OpenAI` and
/// those that do as it does, Slack, Amazon.
const BEGINNINGS: [(&str, usize); 14] = [
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

/// Tokens are made of these; base64 and its dotted chains included.
fn is_of_token(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '+' | '~')
}

/// Letters and digits: words of a language have no digits.
fn is_random(text: &str) -> bool {
    text.bytes().any(|byte| byte.is_ascii_digit()) && text.bytes().any(|byte| byte.is_ascii_alphabetic())
}

fn is_token_by_look(word: &str) -> bool {
    let known = BEGINNINGS.iter().any(|(beginning, least)| {
        word.strip_prefix(beginning).is_some_and(|rest| {
            // A name of a file or a model has words, which have ends.
            let plain = *beginning == "sk-" || beginning.starts_with("xox") || !rest.contains(['-', '.']);
            rest.len() >= *least && plain && is_random(rest)
        })
    });
    // A signed token (JWT): three parts, the first of which is a JSON object in base64.
    known || (word.starts_with("eyJ") && word.len() > 40 && word.matches('.').count() == 2)
}

/// A text whose addresses have neither user nor password, and nothing after a `?`: there are the keys of those that are signed.
pub fn addresses(text: &str) -> String {
    text.split_inclusive(ends_address).map(address).collect()
}

fn ends_address(c: char) -> bool {
    c.is_whitespace() || c == '"' || c == '\''
}

fn address(text: &str) -> String {
    let Some(start) = text.find("://") else { return text.to_owned() };
    let (all, end) = text.split_at(text.trim_end_matches(ends_address).len());
    let (scheme, rest) = all.split_at(start);
    let (place, query) = rest.split_once('?').map_or((rest, ""), |(place, _)| (place, "?***"));
    let places = place.split("://").map(without_user).collect::<Vec<_>>().join("://");
    format!("{scheme}{places}{query}{end}")
}

/// `user:password@host/path` without the first two.
fn without_user(place: &str) -> String {
    let (host, path) = place.split_at(place.find(['/', '#']).unwrap_or(place.len()));
    host.rsplit_once('@').map_or_else(|| place.to_owned(), |(_, host)| format!("{HIDDEN}@{host}{path}"))
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

/// By what follows: `HF_TOKEN` is one, `MAX_TOKENS` with its number and `TOKENIZERS_PARALLELISM` are none.
fn is_token(rest: &str, value: &str) -> bool {
    let counts = rest.starts_with('S') && value.trim().parse::<f64>().is_ok();
    !counts && !rest.starts_with("IZ")
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
            assert_eq!(variable(name, "hush").1, HIDDEN, "{name}");
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
            assert_eq!(variable(name, value).1, value, "{name}");
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
            assert_eq!(addresses(text), shown);
            assert_eq!(is_hidden(shown), text != shown, "{shown}");
        }
        assert_eq!(variable("https_proxy", "u:p@proxy:3128").1, "***@proxy:3128");
        assert_eq!(variable("HTTPS_PROXY", "http://u:p@proxy").1, "http://***@proxy");
    }

    #[test]
    fn tokens_are_known_by_their_look_wherever_they_stand() {
        let hf = "hf_abcdefghijklmnopqrstuvwxyzABCD1234";
        let open = "sk-proj-abcdefgh1234ijkl5678";
        let git = "ghp_abcdefghijklmnopqrstuvwxyz0123456789";
        for (said, shown) in [
            (hf.to_owned(), HIDDEN.to_owned()),
            (format!("It was {hf}."), "It was ***.".to_owned()),
            (format!("a=\"{hf}\", b"), "a=\"***\", b".to_owned()),
            (format!("token:{open};x"), "token:***;x".to_owned()),
            (format!("X-Key: {git}\n"), "X-Key: ***\n".to_owned()),
            ("Authorization: Bearer abc123def456ghi".to_owned(), "Authorization: Bearer ***".to_owned()),
            ("authorization: basic dXNlcjpwYXNzd29yZA==".to_owned(), "authorization: basic ***==".to_owned()),
            ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJlLW9mLWl0".to_owned(), HIDDEN.to_owned()),
        ] {
            assert_eq!(text(&said), shown);
            assert!(is_hidden(&text(&said)));
            assert_eq!(variable("HARMLESS", &said).1, shown);
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
            assert_eq!(text(plain), plain);
        }
    }

    #[test]
    fn secrets_of_a_tool_and_of_flags_are_left_out() {
        let words = |all: &[&str]| all.iter().map(|&one| one.to_owned()).collect::<Vec<_>>();
        let all = words(&["env", "HF_TOKEN=hush", "valgrind", "--leak-check=full"]);
        assert_eq!(tool(&all), ["env", "HF_TOKEN=***", "valgrind", "--leak-check=full"]);
        let all = words(&["--api_key", "hush", "-mu", "https://a:b@c/d?e"]);
        assert_eq!(arguments(&all), ["--api_key", HIDDEN, "-mu", "https://***@c/d?***"]);
    }
}
