//! One way to take a lock. A poisoned one is used on: its data are counters, queues and what is kept to be shown, whose every step leaves
//! them whole, and refusing them would end what has nothing to do with the panic.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
