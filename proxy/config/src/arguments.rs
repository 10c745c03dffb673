//! Parses the few llama-server flags that llama-warden interprets: listening, model, alias,
//! slots, context, micro-batch, stream pings and HTTP threads.
//!
//! All other flags pass through unchanged. As in llama-server, a flag and its value are separate words
//! (`--port 9000`, never `--port=9000`), and `_` in a long flag counts as `-`.

pub use warden_policies::server_flags::{last_value, normal_flag};

/// Meaning of a listening flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListeningFlag {
    /// Address to listen on; llama-warden listens there instead.
    Host,
    /// Port to listen on; llama-warden listens there instead.
    Port,
    /// Flag without effect on a Unix socket.
    Ignored,
    /// Private key of the TLS certificate; llama-warden uses it instead.
    PrivateKey,
    /// TLS certificate; llama-warden uses it instead.
    Certificate,
    /// Path prefix of all routes; llama-warden uses it instead.
    Prefix,
    /// API key, which the llama-server process checks itself.
    Key,
}

/// Listening flags: name, whether a value follows, meaning.
const LISTENING_FLAGS: [(&str, bool, ListeningFlag); 8] = [
    ("--host", true, ListeningFlag::Host),
    ("--port", true, ListeningFlag::Port),
    ("--reuse-port", false, ListeningFlag::Ignored),
    ("--ssl-key-file", true, ListeningFlag::PrivateKey),
    ("--ssl-cert-file", true, ListeningFlag::Certificate),
    ("--api-prefix", true, ListeningFlag::Prefix),
    ("--api-key", true, ListeningFlag::Key),
    ("--api-key-file", true, ListeningFlag::Key),
];

const ALIAS_FLAGS: [&str; 2] = ["-a", "--alias"];
const REMOTE_MODEL_FLAGS: [&str; 8] =
    ["-hf", "-hfr", "--hf-repo", "-mu", "--model-url", "-dr", "--docker-repo", "--models-dir"];

/// Returns the model file given with `-m` or `--model`.
pub fn model_path(args: &[String]) -> Option<&str> {
    last_value(args, &["-m", "--model"])
}

/// Returns the remote source of the model (repository, URL, folder), if one is given instead of a file.
pub fn remote_model(args: &[String]) -> Option<&str> {
    last_value(args, &REMOTE_MODEL_FLAGS)
}

/// Returns the names given with `--alias`, which accepts several separated by commas.
pub fn aliases(args: &[String]) -> Vec<String> {
    let text = last_value(args, &ALIAS_FLAGS).unwrap_or_default();
    text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// Adds `--alias` with the model's name if the flag is missing, because otherwise the process reports the
/// path of its file in every answer. Adds none for a router (`--models-dir`), which is no model, and for a
/// name with a comma, which llama-server would split.
pub fn put_alias(args: &mut Vec<String>, name: &str, is_named: bool) {
    let given = args.iter().any(|word| ALIAS_FLAGS.contains(&normal_flag(word).as_str()));
    let router = last_value(args, &["--models-dir"]).is_some();
    let model = model_path(args).or_else(|| remote_model(args)).is_some();
    if model && !router && !given && !is_named && !name.contains(',') {
        args.extend([ALIAS_FLAGS[1].to_owned(), name.to_owned()]);
    }
}

/// Number of slots (`-np`); `None` if the flag is missing, or leaves the number to the server.
pub fn slots(args: &[String]) -> Option<u32> {
    last_value(args, &["-np", "--parallel"])?.parse().ok().filter(|slots| *slots > 0)
}

/// Context size in tokens (`-c`); `None` if the flag is missing.
pub fn context(args: &[String]) -> Option<u64> {
    last_value(args, &["-c", "--ctx-size"])?.parse().ok()
}

/// Seconds without an event after which a stream gets a comment (`--sse-ping-interval`); with a value below
/// 1, it gets none. `None` if the flag is missing.
pub fn ping_interval(args: &[String]) -> Option<i64> {
    last_value(args, &["--sse-ping-interval"])?.parse().ok()
}

/// Number of HTTP threads (`--threads-http`); `None` if the flag is missing or has no valid number.
pub fn http_threads(args: &[String]) -> Option<u32> {
    last_value(args, &["--threads-http"])?.parse().ok()
}

/// Finds the last of the flags `names` in a command line; returns its text with its value, and true if flag
/// and value equal `words`.
pub fn find_given(args: &[String], names: &[String], words: &[&str]) -> Option<(String, bool)> {
    let at = args.iter().rposition(|word| names.contains(&normal_flag(word)))?;
    let value = args.get(at + 1).filter(|next| !next.starts_with('-') || next.parse::<f64>().is_ok());
    let same = match words {
        // Another spelling of the flag counts as equal, the opposite flag does not.
        [flag] => normal_flag(&args[at]) == *flag,
        [_, wanted] => value.is_some_and(|value| value == wanted),
        _ => false,
    };
    let text = std::iter::once(&args[at]).chain(value).cloned().collect::<Vec<_>>().join(" ");
    Some((text, same))
}

/// The first listening flag among the arguments.
pub fn first_listening(args: &[String]) -> Option<(&'static str, ListeningFlag)> {
    args.iter().find_map(|word| {
        let word = normal_flag(word);
        LISTENING_FLAGS.iter().find(|(flag, ..)| *flag == word).map(|(flag, _, what)| (*flag, *what))
    })
}

/// A command line without its listening flags, and the removed flags.
pub struct SplitArguments {
    /// Arguments for the child.
    pub args: Vec<String>,
    /// Removed flags in order: flag, value, meaning.
    pub listening: Vec<(&'static str, String, ListeningFlag)>,
}

/// Removes the listening flags from a command line, except API keys, which the child checks.
pub fn split_listening(args: &[String]) -> SplitArguments {
    let mut split = SplitArguments { args: Vec::new(), listening: Vec::new() };
    let mut words = args.iter();
    while let Some(word) = words.next() {
        let found = LISTENING_FLAGS.iter().find(|(flag, ..)| *flag == normal_flag(word));
        match found {
            Some((flag, takes_value, what)) if *what != ListeningFlag::Key => {
                let value = if *takes_value { words.next().cloned() } else { None };
                split.listening.push((flag, value.unwrap_or_default(), *what));
            }
            _ => split.args.push(word.clone()),
        }
    }
    split
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn a_process_without_a_name_gets_the_models() {
        for (args, named, put) in [
            ("-m a.gguf -c 1", false, true),
            ("-hf org/a", false, true),
            ("-m a.gguf", true, false),
            ("-m a.gguf -a x", false, false),
            ("--alias x -m a.gguf", false, false),
            ("--models-dir d", false, false),
            ("-c 1", false, false),
        ] {
            let mut own = words(args);
            put_alias(&mut own, "org/name", named);
            let wanted = if put { format!("{args} --alias org/name") } else { args.to_owned() };
            assert_eq!(own, words(&wanted), "{args}");
        }
        let mut own = words("-m a.gguf");
        put_alias(&mut own, "a,b", false);
        assert_eq!(own, words("-m a.gguf"), "it would be two names");
    }

    #[test]
    fn flags_for_listening_are_taken_out_and_the_rest_stays_in_order() {
        let split = split_listening(&words(
            "-m a.gguf --host 0.0.0.0 -c 4096 --port 9000 --reuse_port --api-key k -np 2",
        ));
        assert_eq!(split.args, words("-m a.gguf -c 4096 --api-key k -np 2"));
        let taken: Vec<(&str, &str)> =
            split.listening.iter().map(|(flag, value, _)| (*flag, value.as_str())).collect();
        assert_eq!(taken, [("--host", "0.0.0.0"), ("--port", "9000"), ("--reuse-port", "")]);
    }

    #[test]
    fn the_last_of_a_repeated_flag_counts() {
        assert_eq!(model_path(&words("-m a --model b")), Some("b"));
        assert_eq!(aliases(&words("--alias x,,y")), ["x", "y"]);
        assert_eq!((slots(&words("-np 1 --parallel 4")), slots(&words("-np -1"))), (Some(4), None));
        assert_eq!(remote_model(&words("-hf a/b:Q4")), Some("a/b:Q4"));
        assert_eq!(model_path(&words("-m")), None);
    }

    #[test]
    fn a_flag_is_found_under_all_its_names_and_compared() {
        let names = ["--cache-ram".to_owned(), "-cram".to_owned()];
        let given = |text: &str| find_given(&words(text), &names, &["--cache-ram", "512"]);
        assert_eq!(given("-c 1"), None);
        assert_eq!(given("-cram 512 -c 1"), Some(("-cram 512".to_owned(), true)));
        assert_eq!(given("--cache_ram -1"), Some(("--cache_ram -1".to_owned(), false)));
        assert_eq!(given("-cram 512 -cram 0"), Some(("-cram 0".to_owned(), false)), "the last one counts");
        let both = ["--mmap".to_owned(), "--no-mmap".to_owned()];
        let opposite = find_given(&words("--mmap -c 1"), &both, &["--no-mmap"]);
        assert_eq!(opposite, Some(("--mmap".to_owned(), false)));
        assert_eq!(
            find_given(&words("--no_mmap"), &both, &["--no-mmap"]),
            Some(("--no_mmap".to_owned(), true))
        );
    }

    #[test]
    fn a_listening_flag_is_found_however_it_is_spelled() {
        assert_eq!(first_listening(&words("-c 1 --api_key k")), Some(("--api-key", ListeningFlag::Key)));
        assert_eq!(first_listening(&words("-c 1 -m x")), None);
    }
}
