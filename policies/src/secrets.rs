//! What a report keeps to itself: arguments and variables that are keys, and what an address says beside the place.

/// What stands in the place of a secret.
pub(super) const HIDDEN: &str = "***";

/// Flags whose value is a secret.
const FLAGS: [&str; 3] = ["--api-key", "-hft", "--hf-token"];

/// Whether something was taken out of it, so that it cannot be given to a server any more.
pub(super) fn is_hidden(text: &str) -> bool {
    text == HIDDEN || text.contains("***@") || text.contains("?***")
}

/// A variable without what it says, if that is a secret.
pub(super) fn variable(name: &str, value: &str) -> (String, String) {
    let shown = if is_secret(name, value) {
        HIDDEN.to_owned()
    } else if name.to_ascii_uppercase().contains("PROXY") && !value.contains("://") {
        // A proxy is also understood without `http://`.
        without_user(value)
    } else {
        addresses(value)
    };
    (name.to_owned(), shown)
}

/// Arguments of a server without secrets.
pub(super) fn arguments(args: &[String]) -> Vec<String> {
    let mut hide = false;
    let word = |word: &String| {
        // llama-server takes `_` for `-` in the names of its flags.
        let name = if word.starts_with("--") { word.replace('_', "-") } else { word.clone() };
        let hidden = std::mem::replace(&mut hide, FLAGS.contains(&name.as_str()));
        if hidden { HIDDEN.to_owned() } else { addresses(word) }
    };
    args.iter().map(word).collect()
}

/// Words of another tool without secrets: `env HF_TOKEN=… valgrind`.
pub(super) fn tool(words: &[String]) -> Vec<String> {
    let word = |word: &String| match word.split_once('=') {
        Some((name, value)) => format!("{name}={}", variable(name, value).1),
        None => addresses(word),
    };
    words.iter().map(word).collect()
}

/// A text whose addresses have neither user nor password, and nothing after a `?`: there are the keys of those that are signed.
pub(super) fn addresses(text: &str) -> String {
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
    fn secrets_of_a_tool_and_of_flags_are_left_out() {
        let words = |all: &[&str]| all.iter().map(|&one| one.to_owned()).collect::<Vec<_>>();
        let all = words(&["env", "HF_TOKEN=hush", "valgrind", "--leak-check=full"]);
        assert_eq!(tool(&all), ["env", "HF_TOKEN=***", "valgrind", "--leak-check=full"]);
        let all = words(&["--api_key", "hush", "-mu", "https://a:b@c/d?e"]);
        assert_eq!(arguments(&all), ["--api_key", HIDDEN, "-mu", "https://***@c/d?***"]);
    }
}
