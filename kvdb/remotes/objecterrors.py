"""What object storage answers when it does not do what it was asked, in our words.

``obstore`` gives one text for all that went wrong: the client's words, the server's status and its
document. Of these only the status and the code are used, so that no sentence quotes a header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from kvdb.remotes.remote import PutState, RemoteError, RemoteRefused, RemoteUnreachable

STATUS = re.compile(r"status code: (\d{3})")
CODE = re.compile(r"<Code>\s*(\w{1,60})\s*</Code>|\"(?:code|reason)\": ?\"(\w{1,60})\"")
BUCKET_CODES = {"NoSuchBucket", "ContainerNotFound", "InvalidBucketName", "InvalidResourceName"}
CLOCK_CODES = {"RequestTimeTooSkewed", "RequestExpired"}
KEY_CODES = {
    "AuthenticationFailed", "AuthorizationFailure", "ExpiredToken", "InvalidAccessKeyId",
    "InvalidAuthenticationInfo", "InvalidToken", "SignatureDoesNotMatch", "TokenRefreshRequired",
}  # fmt: skip
REGION_CODES = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
FULL_CODES = {
    "QuotaExceeded", "InsufficientCapacity", "InsufficientStorage", "StorageFull",
    "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded",
}  # fmt: skip
# Where the clients look for a key when none was given: a machine's own, in a cloud.
NO_KEY = re.compile(r"169\.254\.169\.254|fd00:ec2|metadata\.google|token request|credential", re.I)


def _status(error: Exception) -> int | None:
    found = STATUS.search(str(error))
    return None if found is None else int(found[1])


def _code(error: Exception) -> str | None:
    found = CODE.search(str(error))
    return None if found is None else found[1] or found[2]


def absent(error: Exception) -> bool:
    """Whether the server says that there is no such object, or bucket."""
    return isinstance(error, FileNotFoundError)


def bucket_missing(error: Exception) -> bool:
    return _code(error) in BUCKET_CODES


def taken(error: Exception) -> bool:
    """Whether a conditional put found an object, or another put of it under way."""
    return isinstance(error, AlreadyExistsError | PreconditionError) or _status(error) in (409, 412)


def unsupported(error: Exception) -> bool:
    """Whether the server has no conditional put."""
    return isinstance(error, NotSupportedError) or _status(error) == 501


@dataclass(frozen=True, slots=True)
class Refusals:
    """Sentences about one remote. ``place`` is its bucket as users wrote it, ``keys`` says where
    its keys are looked for."""

    place: str
    keys: str
    errors = (BaseError, OSError, ValueError)  # what obstore raises

    def whole(self, error: Exception) -> RemoteError:
        """For a call that cannot go on."""
        status, code = _status(error), _code(error)
        if code in BUCKET_CODES or (status == 404 and "list request" in str(error)):
            return RemoteRefused(f"{self.place} is not there; make it, or correct its name.")
        if code in CLOCK_CODES:
            return RemoteRefused(
                f"{self.place} refused the signature because this machine's clock and the server's "
                "differ; set the clock."
            )
        if code in KEY_CODES or isinstance(error, UnauthenticatedError):
            return RemoteRefused(f"{self.place} does not accept the keys given; check {self.keys}.")
        if code in REGION_CODES or status == 301 or "redirect" in str(error):
            return RemoteRefused(f"{self.place} is in another region; set the option region.")
        if isinstance(error, PermissionDeniedError) or status in (401, 403):
            if NO_KEY.search(str(error)):
                return self._no_keys()
            return RemoteRefused(
                f"{self.place} does not let these keys in; they need to read, write and list there "
                f"(see {self.keys})."
            )
        if status is None:
            return self._no_keys() if NO_KEY.search(str(error)) else self._nobody(error)
        return RemoteUnreachable(f"{self.place} answers with an error ({_word(status, code)}).")

    def of_one(self, error: Exception) -> str:
        """What became of one object that was asked for; raises what concerns the whole call."""
        status = _status(error)
        if status is not None and (status >= 500 or status == 429):
            return _word(status, _code(error))
        raise self.whole(error) from None

    def of_put(self, error: Exception) -> PutState:
        """What became of one object that was sent; raises what concerns the whole call."""
        status, code = _status(error), _code(error)
        if status == 507 or code in FULL_CODES:
            return "full"
        if status is not None and (status >= 500 or status in (400, 409, 413, 429)):
            if code in REGION_CODES | BUCKET_CODES | KEY_CODES:
                raise self.whole(error) from None
            return "failed"
        raise self.whole(error) from None

    def late(self, seconds: float) -> RemoteUnreachable:
        return RemoteUnreachable(f"{self.place} did not answer in {seconds:g} s.")

    def unusable(self, error: Exception) -> str:
        """For settings of which no client can be made."""
        words = str(error).partition("\n")[0].rpartition(" error: ")[2].rstrip(".")
        return f"{self.place} cannot be opened: {words}."

    def _no_keys(self) -> RemoteRefused:
        return RemoteRefused(f"There are no keys for {self.place}; set {self.keys}.")

    def _nobody(self, error: Exception) -> RemoteUnreachable:
        text = str(error)
        for sign, words in (
            ("timed out", "it did not answer in time"),
            ("dns error", "its name is unknown"),
            ("certificate", "its certificate is not trusted; see the option root_certificate"),
            ("Connection refused", "nothing listens there"),
        ):
            if sign in text:
                return RemoteUnreachable(f"{self.place} cannot be reached: {words}.")
        return RemoteUnreachable(f"{self.place} cannot be reached, or is no such server.")


def _word(status: int, code: str | None) -> str:
    return f"{status} {code}" if code else str(status)
