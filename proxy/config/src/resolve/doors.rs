//! Access rules: TLS files, the file of API keys, accepted host names, and allowed web pages.

use std::net::{IpAddr, ToSocketAddrs};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use warden_gateway::{KeySpec, TlsFiles, TlsState};
use warden_policies::{AllowedOrigins, HostNames, ModelName, defaults};
use warden_supervisor::spec::SharedSpec;

use super::keys::KeyFile;
use super::resolver::ConfigResolver;
use crate::arguments::{self, ListeningFlag};
use crate::problem::{ConfigPlace, ConfigProblem, owned_path};
use crate::settings::ModelConfig;

/// Variable that makes llama-server require an API key itself.
pub(crate) const KEY_VARIABLE: &str = "LLAMA_API_KEY";
/// Reason why llama-server processes must not require keys if llama-warden does.
pub(crate) const KEYS_STOP_HERE: &str =
    "with `server.keys` the clients' keys never reach the process, so it would refuse every request";

impl ConfigResolver<'_> {
    pub(crate) fn has_keys(&self) -> bool {
        !self.loaded.settings.server.keys.is_empty()
    }

    /// Resolves the API keys. `others`: names and aliases of models that no local process serves.
    pub(crate) fn resolve_keys(
        &mut self,
        models: &[SharedSpec],
        others: Vec<(ModelName, Vec<String>)>,
    ) -> Option<Vec<KeySpec>> {
        let path = self.resolve_file(&self.loaded.settings.server.keys)?;
        let models = models.iter().map(|model| (model.name.clone(), model.aliases.clone()));
        let names: Vec<_> = models.chain(others).collect();
        let file = match KeyFile::load(&path) {
            Ok(file) => file,
            Err(problems) => {
                self.problems.extend(problems.0);
                return None;
            }
        };
        let (specs, warnings) = file.specs(&names);
        if specs.iter().any(|key| key.operator) && !self.loaded.settings.server.api_prefix.is_empty() {
            let message = "a key has `operator = true`, which opens the page at /page/, and with \
                           `server.api_prefix` the page's own addresses would lead elsewhere";
            let hint = "take `operator` from the key, or listen without `server.api_prefix`";
            self.report(&["server", "api_prefix"], message, hint);
        }
        self.warnings.extend(warnings);
        Some(specs)
    }

    /// Returns the source of the variable that makes a model's process require a key, if it is set.
    pub(crate) fn key_variable(&self, name: &str, model: &ModelConfig) -> Option<ConfigPlace> {
        if model.env.contains_key(KEY_VARIABLE) {
            return Some(self.place(&["models", name, "env", KEY_VARIABLE]));
        }
        self.machine.var(KEY_VARIABLE).map(|_| ConfigPlace::Env(KEY_VARIABLE.to_owned()))
    }

    fn processes_need_keys(&self) -> bool {
        self.loaded.models.iter().all(|(name, model)| {
            let flag =
                arguments::first_listening(&model.args).is_some_and(|(_, what)| what == ListeningFlag::Key);
            // Another program does not obey llama-server's variable.
            !model.runs_other_program() && (flag || self.key_variable(name, model).is_some())
        })
    }

    /// Resolves the accepted host names, against DNS rebinding. On a loopback address without keys, a page
    /// whose own host name resolves to this address would pass the browser's same-origin rules, so other host
    /// names are refused. If all pages are allowed anyway, no check is needed. On other addresses, clients
    /// use host names that are unknown here, and keys protect.
    pub(crate) fn host_names(&self) -> HostNames {
        let server = &self.loaded.settings.server;
        let closed = server.cors != AllowedOrigins::Mirror && !self.has_keys() && !self.processes_need_keys();
        server.names.clone().resolve(closed && is_loopback(&server.host))
    }

    /// Warns if all web pages are allowed, other machines can connect, and no key is required: then any page
    /// that a user in the network opens can use the models.
    pub(crate) fn check_origins(&mut self) {
        let server = &self.loaded.settings.server;
        if server.cors != AllowedOrigins::Mirror
            || self.has_keys()
            || self.processes_need_keys()
            || is_loopback(&server.host)
        {
            return;
        }
        let message = format!(
            "`server.host` is {}, no key is asked for, and web pages of any origin may call: any page that a user \
             of the network opens can use the models",
            server.host
        );
        let hint = "name a file of keys in `server.keys`, or the pages in `server.cors`, or set \
                    `server.cors = \"off\"`";
        self.warn(&["server", "host"], message, hint);
    }

    /// Returns the section `[server]` with absolute paths. Unusable files are reported as problems.
    pub(crate) fn server(&mut self) -> defaults::Server {
        let mut server = self.loaded.settings.server.clone();
        for path in [&mut server.tls_cert, &mut server.tls_key] {
            if !path.is_empty() {
                *path = self.absolute(Path::new(path)).to_string_lossy().into_owned();
            }
        }
        if let Some(files) = TlsFiles::from_settings(&server.tls_cert, &server.tls_key) {
            self.check_tls(files);
        }
        server
    }

    fn check_tls(&mut self, files: TlsFiles) {
        let loaded = self.loaded;
        let place = |key| match loaded.place(&owned_path(&["server", key])) {
            ConfigPlace::Default => ConfigPlace::Nowhere,
            place => place,
        };
        if is_readable_by_all(&files.key) {
            let message = format!("the TLS key {} can be read by everybody here", files.key.display());
            let hint = format!("run `chmod o-r {}`", files.key.display());
            self.warnings.push(ConfigProblem::new(place("tls_key"), message).with_hint(hint));
        }
        if let Err(error) = TlsState::load(files) {
            let is_key = self.loaded.settings.server.tls_cert.is_empty();
            let place = place(if is_key { "tls_key" } else { "tls_cert" });
            let hint = "`server.tls_cert` and `server.tls_key` are PEM files that llama-warden can read; \
                        without both, it speaks HTTP";
            self.problems.push(ConfigProblem::new(place, error.to_string()).with_hint(hint));
        }
    }
}

fn is_readable_by_all(key: &Path) -> bool {
    std::fs::metadata(key).is_ok_and(|facts| facts.permissions().mode() & 0o004 != 0)
}

/// Returns true if all hosts are loopback addresses. A name that does not resolve is reported elsewhere.
fn is_loopback(hosts: &str) -> bool {
    hosts.split(',').all(is_loopback_host)
}

fn is_loopback_host(host: &str) -> bool {
    let bare = host.trim().trim_start_matches('[').trim_end_matches(']');
    match bare.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => (bare, 0).to_socket_addrs().map_or(true, |mut all| all.all(|one| one.ip().is_loopback())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::HostMachine;
    use crate::resolve::{ResolvedConfig, resolve_config};
    use crate::source::layers::{ConfigSources, load_config};

    /// Resolves a configuration next to a file with one key.
    fn read(
        server: &str,
        model: &str,
        any_name: bool,
        env: &[(&str, &str)],
    ) -> Result<ResolvedConfig, String> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("m.gguf"), "").unwrap();
        let hash = warden_gateway::KeyHash::from_key(b"k").to_hex();
        let keys = format!("[alice]\nsha256 = \"{hash}\"\nmodels = [\"a\", \"nick\", \"z\"]\n");
        std::fs::write(dir.path().join("keys.toml"), keys).unwrap();
        let file = dir.path().join("w.toml");
        let text = format!("[server]\n{server}\n[models.a]\nmodel = \"m.gguf\"\n{model}\n");
        std::fs::write(&file, text).unwrap();
        let loaded = load_config(ConfigSources { file: Some(file), ..ConfigSources::default() }).unwrap();
        let mut machine = HostMachine::read();
        machine.env = env.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        resolve_config(&loaded, &machine, any_name).map_err(|problems| problems.lines().join("\n"))
    }

    const KEYS: &str = "keys = \"keys.toml\"";

    #[test]
    fn the_file_is_beside_the_configuration_and_unknown_models_are_told() {
        let resolved = read(KEYS, "aliases = [\"nick\"]", false, &[]).unwrap();
        let keys = resolved.gateway.keys.unwrap();
        assert_eq!((keys.len(), &*keys[0].name), (1, "alice"));
        assert_eq!(keys[0].models.as_ref().unwrap().len(), 1, "by name and by alias it is one model");
        let [warning] = resolved.warnings.as_slice() else { panic!("{:?}", resolved.warnings) };
        assert!(warning.to_string().ends_with("keys.toml:1: key `alice`: `z` in `models` means no model"));
        assert!(read("", "", false, &[]).unwrap().gateway.keys.is_none());
        assert!(
            read("keys = \"no.toml\"", "", false, &[])
                .unwrap_err()
                .contains("no.toml: the file of keys cannot")
        );
    }

    #[test]
    fn a_page_behind_a_prefix_is_refused_before_its_links_lead_nowhere() {
        let dir = tempfile::tempdir().unwrap();
        let keys = dir.path().join("keys.toml");
        let hash = warden_gateway::KeyHash::from_key(b"k").to_hex();
        for (operator, refused) in [(true, true), (false, false)] {
            std::fs::write(&keys, format!("[a]\nsha256 = \"{hash}\"\noperator = {operator}\n")).unwrap();
            let server = format!("keys = \"{}\"\napi_prefix = \"/llm\"", keys.display());
            let told = read(&server, "", false, &[]);
            assert_eq!(told.as_ref().is_err_and(|told| told.contains("/page/")), refused, "{told:?}");
        }
    }

    #[test]
    fn a_process_that_asks_for_keys_itself_is_told_and_nothing_is_added() {
        for any_name in [false, true] {
            let told = read(KEYS, "args = [\"--api-key\", \"s3cret\"]", any_name, &[]).unwrap_err();
            assert!(told.contains("`--api-key` in `args`: with `server.keys`"), "{told}");
            assert!(told.contains("it would refuse every request") && !told.contains("s3cret"), "{told}");
            let told = read(KEYS, "", any_name, &[(KEY_VARIABLE, "s3cret")]).unwrap_err();
            assert!(
                told.contains("environment variable LLAMA_API_KEY") && !told.contains("s3cret"),
                "{told}"
            );
        }
        assert!(read("", "args = [\"--api-key\", \"k\"]", true, &[]).is_ok(), "drop-in without keys: theirs");
    }

    #[test]
    fn foreign_names_are_refused_only_where_they_get_a_page_past_closed_doors() {
        let takes = |server: &str, model: &str| {
            read(server, model, true, &[]).unwrap().gateway.names.allow("evil.example")
        };
        for server in
            ["cors = \"off\"", "cors = [\"https://app.example\"]", "cors = \"off\"\nhost = \"localhost\""]
        {
            assert!(!takes(server, ""), "{server}");
            assert!(takes(&format!("{server}\nnames = \"any\""), ""), "{server}");
            assert!(takes(&format!("{server}\nnames = [\"evil.example\"]"), ""), "{server}");
        }
        for server in ["", "cors = \"off\"\nhost = \"0.0.0.0\"", "cors = \"off\"\nkeys = \"keys.toml\""] {
            assert!(takes(server, ""), "{server}");
            assert!(!takes(&format!("{server}\nnames = [\"llm.example\"]"), ""), "{server}");
        }
        assert!(takes("cors = \"off\"", "args = [\"--api-key\", \"k\"]"));
    }

    #[test]
    fn pages_of_all_origins_are_warned_about_where_nobody_is_asked_for_a_key() {
        let warned = |server: &str, model: &str| {
            let resolved = read(server, model, true, &[]).unwrap();
            resolved.warnings.iter().any(|warning| warning.to_string().contains("web pages of any origin"))
        };
        assert!(warned("host = \"0.0.0.0\"", "") && warned("host = \"::\"", ""));
        assert!(warned("host = \"127.0.0.1,0.0.0.0\"", ""));
        for server in [
            "",
            "host = \"127.0.0.2\"",
            "host = \"127.0.0.1, ::1\"",
            "host = \"[::1]\"",
            "host = \"localhost\"",
            "host = \"0.0.0.0\"\ncors = \"off\"",
            "host = \"0.0.0.0\"\ncors = [\"https://app.example\"]",
            "host = \"0.0.0.0\"\nkeys = \"keys.toml\"",
        ] {
            assert!(!warned(server, ""), "{server}");
        }
        assert!(!warned("host = \"0.0.0.0\"", "args = [\"--api-key\", \"k\"]"));
    }
}
