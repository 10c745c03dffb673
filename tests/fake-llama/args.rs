//! llama-server's flags, as far as fake-llama needs them.
//!
//! Unknown flags and their values are ignored, which the usual argument parsers cannot do. `--no-such-flag`
//! is refused, with llama-server's message.

use std::path::PathBuf;

#[derive(Debug)]
pub(crate) enum Parsed {
    Serve(Args),
    Version,
    Help,
}

#[derive(Debug, Clone)]
pub(crate) struct Args {
    /// `-m`: must exist, but is never read.
    pub(crate) model: Option<PathBuf>,
    /// `-a`, or the model's path.
    pub(crate) alias: String,
    /// `--host`: addresses and `*.sock` paths, separated by commas.
    pub(crate) hosts: Vec<String>,
    /// `--port`; 0 lets the system choose.
    pub(crate) port: u16,
    /// `-np`: number of concurrent generations.
    pub(crate) slots: u32,
    /// `-c`: context length in tokens, for all slots together.
    pub(crate) context: u64,
    pub(crate) metrics: bool,
    /// `--cache-ram`: MiB of the prompt cache, 0 for none, negative for no limit.
    pub(crate) cache_ram: i64,
    pub(crate) api_key: Option<String>,
    /// `--slot-save-path`: a directory.
    pub(crate) slot_save_path: Option<PathBuf>,
    /// `--mmproj`: accepts images.
    pub(crate) mmproj: bool,
}

/// Parses the flags after the program's name.
///
/// # Errors
/// The line that llama-server prints before it exits with 1.
pub(crate) fn parse(flags: &[String]) -> Result<Parsed, String> {
    let mut args = Args {
        model: None,
        alias: String::new(),
        hosts: vec!["127.0.0.1".to_owned()],
        port: 8080,
        slots: 4,
        context: 4096,
        metrics: false,
        cache_ram: std::env::var("LLAMA_ARG_CACHE_RAM").ok().and_then(|mib| mib.parse().ok()).unwrap_or(8192),
        api_key: None,
        slot_save_path: None,
        mmproj: false,
    };
    let mut alias = None;
    let mut rest = flags.iter().map(String::as_str).peekable();
    while let Some(flag) = rest.next() {
        let mut value =
            || rest.next_if(|next| is_value(next)).ok_or(format!("error: missing value for {flag}"));
        match flag {
            "--version" => return Ok(Parsed::Version),
            "-h" | "--help" | "--usage" => return Ok(Parsed::Help),
            "-m" | "--model" => args.model = Some(PathBuf::from(value()?)),
            "-a" | "--alias" => alias = Some(value()?.to_owned()),
            "--host" => args.hosts = value()?.split(',').map(str::to_owned).collect(),
            "--port" => args.port = number(flag, value()?)?,
            "-np" | "--parallel" => {
                args.slots = number::<i64>(flag, value()?)?.try_into().unwrap_or(4).max(1);
            }
            "-c" | "--ctx-size" => args.context = number(flag, value()?)?,
            "-cram" | "--cache-ram" => args.cache_ram = number(flag, value()?)?,
            "--api-key" => args.api_key = Some(value()?.to_owned()),
            "--slot-save-path" => {
                let path = PathBuf::from(value()?);
                if !path.is_dir() {
                    return Err(format!(
                        "error while handling argument \"{flag}\": not a directory: {}",
                        path.display()
                    ));
                }
                args.slot_save_path = Some(path);
            }
            "--metrics" => args.metrics = true,
            "-mm" | "--mmproj" => {
                value()?;
                args.mmproj = true;
            }
            other if crate::help::refuses(other) => return Err(format!("error: invalid argument: {other}")),
            "--no-such-flag" => return Err(format!("error: invalid argument: {flag}")),
            other if other.starts_with('-') => {
                let _ignored = rest.next_if(|next| is_value(next));
            }
            other => return Err(format!("error: invalid argument: {other}")),
        }
    }
    args.alias =
        alias.or_else(|| args.model.as_ref().map(|path| path.display().to_string())).unwrap_or_default();
    Ok(Parsed::Serve(args))
}

/// Returns true for a word that is no flag; `-1` is a value.
fn is_value(word: &str) -> bool {
    !word.starts_with('-') || word.parse::<f64>().is_ok()
}

fn number<T: std::str::FromStr>(flag: &str, word: &str) -> Result<T, String> {
    word.parse().map_err(|_| format!("error while handling argument \"{flag}\": stoi"))
}
