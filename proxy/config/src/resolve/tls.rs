//! Resolves the paths of TLS certificate and key, and checks that the files are usable; keeps no content.

use std::path::Path;

use warden_gateway::{TlsFiles, TlsState};
use warden_policies::defaults;

use crate::problem::{ConfigPlace, ConfigProblem};
use crate::resolve::ConfigResolver;

impl ConfigResolver<'_> {
    /// Returns the section `[server]` with absolute paths. Unusable files are reported as problems.
    pub(crate) fn server(&mut self) -> defaults::Server {
        let mut server = self.loaded.settings.server.clone();
        for path in [&mut server.tls_cert, &mut server.tls_key] {
            if !path.is_empty() {
                *path = self.absolute(Path::new(path)).to_string_lossy().into_owned();
            }
        }
        if let Some(files) = TlsFiles::from_settings(&server.tls_cert, &server.tls_key) {
            self.check_tls(files, server.h2);
        }
        server
    }

    fn check_tls(&mut self, files: TlsFiles, h2: bool) {
        let place = |resolver: &Self, key| match resolver.place(&["server", key]) {
            ConfigPlace::Default => ConfigPlace::Nowhere,
            place => place,
        };
        if readable_by_all(&files.key) {
            let message = format!("the TLS key {} can be read by everybody here", files.key.display());
            let problem = ConfigProblem::new(place(self, "tls_key"), message);
            self.warnings.push(problem.with_hint(format!("run `chmod o-r {}`", files.key.display())));
        }
        if let Err(error) = TlsState::load(files, h2) {
            let place = place(
                self,
                if self.loaded.settings.server.tls_cert.is_empty() { "tls_key" } else { "tls_cert" },
            );
            let problem = ConfigProblem::new(place, error.to_string());
            let hint = "`server.tls_cert` and `server.tls_key` are PEM files that llama-warden can read; without both, it speaks HTTP";
            self.problems.push(problem.with_hint(hint));
        }
    }
}

fn readable_by_all(key: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(key).is_ok_and(|facts| facts.permissions().mode() & 0o004 != 0)
}
